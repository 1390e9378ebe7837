"""Our distillation step against a plain re-implementation of the DistilBERT example's, and against its own floor.

    python benchmarks/step.py                        # the shapes of this device
    python benchmarks/step.py --shapes small --threads 1

The plain step asks both models for all logits and hidden states, selects positions with boolean masks and reduces with
torch's own losses. Both train the same models on the same batches: soft targets (T = 2), masked words, cosine,
gradients accumulated over `--accumulate` micro-batches, clipping, AdamW. Every variant has a process of its own and all
take turns; times are medians per micro-batch. The floor is the matrix work that no arrangement of this step can avoid,
at the matrix rate measured in the same run: encoder layers (teacher forward, student forward and backward), attention,
and the heads at the rows that carry a term.
"""

import argparse
import multiprocessing
import re
import resource
import statistics
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from machine import save, table
from torch.nn.functional import cosine_embedding_loss, cross_entropy, kl_div
from torch.profiler import record_function
from transformers import BertConfig, BertForMaskedLM, DistilBertConfig, DistilBertForMaskedLM

from distill import optim
from distill.backends.single import Single
from distill.config import Backend, Masking, Objective, Optimizer, Precision, Rows
from distill.data.batches import Batch, make_batch
from distill.data.collate.mlm import IGNORE, Masker
from distill.kernels.precision import autocast, casts_kept
from distill.objective.objective import Objective as CombinedObjective
from distill.setup import place

TEMPERATURE, WEIGHTS = 2.0, (5.0, 2.0, 1.0)


class Shape(NamedTuple):
    teacher_layers: int
    student_layers: int
    width: int
    vocabulary: int
    rows: int
    tokens: int

    @property
    def heads(self) -> int:
        return max(1, self.width // 64)

    def __str__(self) -> str:
        models = f"{self.teacher_layers}x{self.width} -> {self.student_layers}x{self.width}"
        return f"{models}, V {self.vocabulary}, {self.rows} x {self.tokens}"


SHAPES = {
    "base": Shape(12, 6, 768, 30522, 8, 128),
    "small": Shape(4, 2, 256, 8192, 16, 128),
    "embedded": Shape(4, 2, 192, 6144, 16, 128),
    "base-512": Shape(12, 6, 768, 30522, 16, 512),
    "tiny": Shape(2, 1, 64, 500, 2, 16),  # to try the script
}


class Variant(NamedTuple):
    name: str
    rows: Rows
    precision: Precision
    plain: bool = False


def variants(rows: Rows, device: torch.device, more: bool) -> list[Variant]:
    """The plain step comes first: the others are compared with it."""
    fp32, bf16 = Precision(), Precision(student="bf16", teacher="bf16")
    found = [
        Variant("plain fp32", rows, fp32, plain=True),
        Variant("plain bf16", rows, bf16, plain=True),
        Variant("ours fp32", rows, fp32),
        Variant("ours bf16", rows, bf16),
        Variant("ours bf16, eager objective", rows, bf16),
    ]
    if device.type == "cpu":
        found.append(Variant("ours bf16, int8 teacher", rows, Precision(student="bf16", teacher="int8")))
    if more:
        compiled = Precision(student="bf16", teacher="bf16", compile=True)
        found.append(Variant("ours bf16, models compiled", rows, compiled))
    return found


def make_teacher(shape: Shape, device: torch.device) -> Any:
    """A frozen BERT with random weights: time does not depend on them."""
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.width,
        num_hidden_layers=shape.teacher_layers,
        num_attention_heads=shape.heads,
        intermediate_size=4 * shape.width,
    )
    return BertForMaskedLM(config).to(device).eval().requires_grad_(False)


def make_student(shape: Shape, device: torch.device) -> Any:
    torch.manual_seed(1)
    config = DistilBertConfig(
        vocab_size=shape.vocabulary,
        dim=shape.width,
        n_layers=shape.student_layers,
        n_heads=shape.heads,
        hidden_dim=4 * shape.width,
    )
    return DistilBertForMaskedLM(config).to(device).train()


def batches(shape: Shape, count: int, device: torch.device) -> list[Batch]:
    """Full rows of random tokens, 15 % of them to be predicted, as in training."""
    ordinary = np.arange(shape.vocabulary) >= 5
    masker = Masker(Masking(), 4, ordinary, np.ones(shape.vocabulary), np.zeros(shape.vocabulary, bool))
    random = np.random.default_rng(0)
    made = []
    for i in range(count):
        ids = random.integers(5, shape.vocabulary, (shape.rows, shape.tokens))
        keys = np.arange(i * shape.rows, (i + 1) * shape.rows, dtype=np.uint64)
        made.append(make_batch(ids, keys, masker, pad_id=0).to(device))
    return made


def plain_loss(student: Any, teacher: Any, batch: Batch, variant: Variant) -> torch.Tensor:
    """The example's loss of one micro-batch, means over its own positions."""
    attention = torch.ones_like(batch.inputs)
    with torch.no_grad(), autocast(variant.precision.teacher, batch.inputs.device):
        taught = teacher(input_ids=batch.inputs, attention_mask=attention, output_hidden_states=True)
    with autocast(variant.precision.student, batch.inputs.device):
        made = student(input_ids=batch.inputs, attention_mask=attention, output_hidden_states=True)
    ours, theirs = made.logits.float(), taught.logits.float()
    targets = batch.targets.view_as(batch.inputs)
    chosen = (targets != IGNORE) if variant.rows is Rows.masked else attention.bool()
    where = chosen[..., None].expand_as(ours)
    ours_chosen = ours.masked_select(where).view(-1, ours.shape[-1])
    theirs_chosen = theirs.masked_select(where).view(-1, ours.shape[-1])
    log_q, p = (ours_chosen / TEMPERATURE).log_softmax(-1), (theirs_chosen / TEMPERATURE).softmax(-1)
    soft = kl_div(log_q, p, reduction="batchmean") * TEMPERATURE**2
    mlm = cross_entropy(ours.view(-1, ours.shape[-1]), targets.view(-1))
    hidden = [output.hidden_states[-1].float() for output in (made, taught)]
    rows = [h.masked_select(attention.bool()[..., None].expand_as(h)).view(-1, h.shape[-1]) for h in hidden]
    cosine = cosine_embedding_loss(*rows, torch.ones(len(rows[0]), device=rows[0].device))
    return WEIGHTS[0] * soft + WEIGHTS[1] * mlm + WEIGHTS[2] * cosine


def plain_step(teacher: Any, student: Any, variant: Variant) -> Callable[[list[Batch]], None]:
    optimizer = torch.optim.AdamW(student.parameters(), lr=5e-4, eps=1e-6, betas=(0.9, 0.98))

    def step(window: list[Batch]) -> None:
        for batch in window:
            (plain_loss(student, teacher, batch, variant) / len(window)).backward()
        torch.nn.utils.clip_grad_norm_(student.parameters(), 5.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def our_step(teacher: Any, student: Any, variant: Variant) -> Callable[[list[Batch]], None]:
    """What `distill.train` does in a step, with its own parts."""
    device = student.device
    settings = Objective()
    settings.soft.rows = variant.rows
    compiled = "eager" not in variant.name
    objective = CombinedObjective(settings, variant.precision, student.config.vocab_size, compiled)
    backend = Single(Backend(device=str(device)))
    teacher = place(teacher, student, variant.precision, backend)
    optimizer = optim.build(student, Optimizer())

    def step(window: list[Batch]) -> None:
        counts = objective.counts(window)
        sums = torch.zeros(3, device=device)
        backend.zero_gradients()
        with casts_kept(device):
            for batch, taught in objective.ask(teacher, window):
                with record_function("student and objective"):
                    loss, parts = objective(student, teacher, batch, counts, taught)
                with record_function("backward"):
                    loss.backward()
                sums += parts
        riders = backend.sum_gradients(sums)
        assert riders is not None and len(riders.tolist()) == 3
        with record_function("clipping and optimizer"):
            optim.clip(student, 5.0)
            optimizer.step()

    return step


def matrix_rate(shape: Shape, dtype: torch.dtype, device: torch.device) -> float:
    """Operations per second of the fastest of the step's own large matrix products, each timed three times."""
    tokens, width, best = shape.rows * shape.tokens, shape.width, 0.0
    for inner, outer in ((width, 4 * width), (4 * width, width), (width, shape.vocabulary)):
        a, b = (torch.randn(size, dtype=dtype, device=device) for size in ((tokens, inner), (outer, inner)))
        out = torch.empty(tokens, outer, dtype=dtype, device=device)
        for _ in range(3):
            wait(device)
            began = time.perf_counter()
            torch.mm(a, b.t(), out=out)
            wait(device)
            best = max(best, 2 * tokens * inner * outer / (time.perf_counter() - began))
    return best


def operations(shape: Shape, rows: Rows) -> float:
    """Matrix operations of one micro-batch: a forward is 1, a forward with its backward 3."""
    tokens, width = shape.rows * shape.tokens, shape.width
    layer = 24 * width**2 + 4 * shape.tokens * width
    chosen = tokens if rows is Rows.all else round(0.15 * tokens)
    head = 2 * width * (shape.vocabulary + width)
    return float(tokens * layer * (shape.teacher_layers + 3 * shape.student_layers) + chosen * head * (1 + 3))


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def serve(calls: Connection, shape: Shape, variant: Variant, options: argparse.Namespace) -> None:
    """One variant in a process of its own, as its user would run it: answers each call with a step's seconds."""
    device = torch.device(options.device)
    if options.threads:
        torch.set_num_threads(options.threads)
    window = batches(shape, options.accumulate, device)
    teacher, student = make_teacher(shape, device), make_student(shape, device)
    step = (plain_step if variant.plain else our_step)(teacher, student, variant)
    for _ in range(2):  # compiles, and lets malloc find its size
        step(window)
    calls.send(0.0)
    while calls.recv():
        wait(device)
        began = time.perf_counter()
        step(window)
        wait(device)
        calls.send(time.perf_counter() - began)
    on_gpu = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    calls.send(on_gpu or 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)


def measure(shape: Shape, rows: Rows, options: argparse.Namespace, device: torch.device) -> list[dict[str, Any]]:
    """All variants take turns, and between the rounds the matrix rate is measured."""
    chosen = [v for v in variants(rows, device, options.compile) if re.search(options.only, v.name)]
    spawn, calls, processes = multiprocessing.get_context("spawn"), [], []
    for variant in chosen:
        ours, theirs = spawn.Pipe()
        process = spawn.Process(target=serve, args=(theirs, shape, variant, options), daemon=True)
        process.start()
        ours.recv()
        calls.append(ours)
        processes.append(process)
    seconds: list[list[float]] = [[] for _ in chosen]
    rates: dict[torch.dtype, list[float]] = {torch.float32: [], torch.bfloat16: []}
    for _ in range(options.rounds):
        for dtype, found in rates.items():
            found.append(matrix_rate(shape, dtype, device))
        for call, times in zip(calls, seconds, strict=True):
            call.send(True)
            times.append(call.recv() / options.accumulate)
    results = []
    for variant, times, call in zip(chosen, seconds, calls, strict=True):
        call.send(False)
        rate = statistics.median(rates[torch.float32 if variant.precision.student == "fp32" else torch.bfloat16])
        results.append(
            {
                "shape": str(shape),
                "rows": rows.value,
                "variant": variant.name,
                "seconds": statistics.median(times),
                "all": times,
                "floor": operations(shape, rows) / rate,
                "rate": rate,
                "peak": call.recv(),
            }
        )
    for process in processes:
        process.join()
    return results


def lines(results: list[dict[str, Any]]) -> list[list[str]]:
    plain = {r["rows"]: r["seconds"] for r in results if r["variant"] == "plain fp32"}
    return [
        [
            f"{r['shape']}, {r['rows']} rows",
            r["variant"],
            f"{1000 * r['seconds']:.0f}",
            f"{plain[r['rows']] / r['seconds']:.2f}" if r["rows"] in plain else "-",
            f"{r['floor'] / r['seconds']:.0%}",
            f"{r['rate'] / 1e9:.0f}",
            f"{r['peak'] / 2**30:.1f}",
        ]
        for r in results
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--shapes", help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--accumulate", type=int, default=8, help="micro-batches per step")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--rows", default="all,masked", help="that carry soft targets")
    parser.add_argument("--only", default="", help="variants whose name this regular expression finds")
    parser.add_argument("--compile", action="store_true", help="also with precision.compile=true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    device = torch.device(options.device)
    shapes = options.shapes or ("base-512,base" if device.type == "cuda" else "base,small,embedded")
    results: list[dict[str, Any]] = []
    for name in shapes.split(","):
        for rows in options.rows.split(","):
            results += measure(SHAPES[name], Rows(rows), options, device)
    print(
        "milliseconds per micro-batch; matrix rate in Gop/s, fp32 or bf16 as the student's; the process's peak memory\n"
    )
    print(table(["shape", "step", "ms", "times as fast as plain fp32", "of the floor", "rate", "GiB"], lines(results)))
    save(options.json, results)


if __name__ == "__main__":
    main()
