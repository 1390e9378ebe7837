"""A training step of Distill against a plain re-implementation of the DistilBERT example's, and against its own floor.

    python benchmarks/step.py                        # the shapes of this device
    python benchmarks/step.py --shapes small --threads 1

What is timed is the loop of `distill.train` itself, from one call of its observer to the next. The plain step asks both
models for all logits and hidden states, selects positions with boolean masks and reduces with torch's own losses. Both
train the same models on the same batches: soft targets (T = 2), masked words, cosine, gradients accumulated over
`--accumulate` micro-batches, clipping, AdamW. Every variant has a process of its own and all take turns; times are
medians per micro-batch. The floor is the matrix work that no arrangement of this step can avoid, at the matrix rate
measured in the same run: encoder layers (teacher forward, student forward and backward), attention, and the heads at
the rows that carry a term.
"""

import argparse
import contextlib
import multiprocessing
import re
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from machine import save, table
from torch.nn.functional import cosine_embedding_loss, cross_entropy, kl_div
from transformers import BertConfig, BertForMaskedLM, DistilBertConfig, DistilBertForMaskedLM

from distill import optim
from distill.backends.single import Single
from distill.checkpoint import Checkpoints, State
from distill.compose import objective_config
from distill.config import (
    BackendConfig,
    MaskingConfig,
    ObjectiveConfig,
    OptimizerConfig,
    PrecisionConfig,
    ScheduleConfig,
    TrainConfig,
)
from distill.data.batch import Batch
from distill.data.batches import Batches
from distill.data.collate.mlm import MaskedLM
from distill.kernels.precision import autocast
from distill.objective.build import build_objective, fit_terms, make_terms
from distill.setup import setup_models
from distill.teacher.live import LiveTeacher
from distill.threads import limit_spinning
from distill.train import Training, train

TEMPERATURE, WEIGHTS = 2.0, {"soft": 5.0, "mlm": 2.0, "cosine": 1.0}
NO_TARGET = -100
WARM_UP = 2  # steps

AfterStep = Callable[[], None]


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
    rows: str  # that carry soft targets: all or masked
    precision: PrecisionConfig
    plain: bool = False


def variants(rows: str, device: torch.device, more: bool) -> list[Variant]:
    """The plain step comes first: the others are compared with it."""
    fp32, bf16 = PrecisionConfig(), PrecisionConfig(student="bf16", teacher="bf16")
    found = [
        Variant("plain fp32", rows, fp32, plain=True),
        Variant("plain bf16", rows, bf16, plain=True),
        Variant("distill fp32", rows, fp32),
        Variant("distill bf16", rows, bf16),
        Variant("distill bf16, eager objective", rows, bf16),
    ]
    if device.type == "cpu":
        found.append(Variant("distill bf16, int8 teacher", rows, PrecisionConfig(student="bf16", teacher="int8")))
    if more:
        compiled = PrecisionConfig(student="bf16", teacher="bf16", compile=True)
        found.append(Variant("distill bf16, models compiled", rows, compiled))
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


def batches(shape: Shape, accumulate: int, steps: int) -> Batches:
    """Rows of random tokens for so many steps, 15 % of them to be predicted, as in training."""
    maskable = np.arange(shape.vocabulary) >= 5
    masks = MaskedLM(MaskingConfig(), 4, 0, maskable, np.ones(shape.vocabulary), np.zeros(shape.vocabulary, bool))
    size = (steps * accumulate * shape.rows, shape.tokens)
    rows = np.random.default_rng(0).integers(5, shape.vocabulary, size, dtype=np.uint16)
    return Batches(rows, masks, shape.rows, accumulate, seed=0)


def plain_loss(student: Any, teacher: Any, batch: Batch, variant: Variant) -> torch.Tensor:
    """The example's loss of one micro-batch, means over its own positions."""
    inputs: dict[str, Any] = {
        "input_ids": batch.ids,
        "attention_mask": torch.ones_like(batch.ids),
        "output_hidden_states": True,
    }
    with torch.no_grad(), autocast(variant.precision.teacher, batch.ids.device):
        teacher_output = teacher(**inputs)
    with autocast(variant.precision.student, batch.ids.device):
        student_output = student(**inputs)
    student_logits, teacher_logits = student_output.logits.float(), teacher_output.logits.float()
    vocabulary = student_logits.shape[-1]
    positions, values = batch.labels["mlm"]
    targets = torch.full_like(batch.ids, NO_TARGET).view(-1)
    targets[positions] = values
    attended = inputs["attention_mask"].bool()
    chosen = (targets.view_as(batch.ids) != NO_TARGET) if variant.rows == "masked" else attended
    where = chosen[..., None].expand_as(student_logits)
    student_chosen = student_logits.masked_select(where).view(-1, vocabulary)
    teacher_chosen = teacher_logits.masked_select(where).view(-1, vocabulary)
    log_q, p = (student_chosen / TEMPERATURE).log_softmax(-1), (teacher_chosen / TEMPERATURE).softmax(-1)
    soft = kl_div(log_q, p, reduction="batchmean") * TEMPERATURE**2
    mlm = cross_entropy(student_logits.view(-1, vocabulary), targets)
    hidden = [output.hidden_states[-1].float() for output in (student_output, teacher_output)]
    rows = [h.masked_select(attended[..., None].expand_as(h)).view(-1, h.shape[-1]) for h in hidden]
    cosine = cosine_embedding_loss(rows[0], rows[1], torch.ones(len(rows[0]), device=rows[0].device))
    return WEIGHTS["soft"] * soft + WEIGHTS["mlm"] * mlm + WEIGHTS["cosine"] * cosine


def train_plainly(source: Batches, pair: tuple[Any, Any], variant: Variant, steps: int, after_step: AfterStep) -> None:
    """The example's loop."""
    teacher, student = pair
    optimizer = torch.optim.AdamW(student.parameters(), lr=5e-4, eps=1e-6, betas=(0.9, 0.98))
    for window in source.stream(0, steps, student.device):
        for batch in window:
            (plain_loss(student, teacher, batch, variant) / len(window)).backward()
        torch.nn.utils.clip_grad_norm_(student.parameters(), 5.0)
        optimizer.step()
        optimizer.zero_grad()
        after_step()


@dataclass
class CallAfterStep:
    """An observer of `distill.train` that reports nothing."""

    after_step: AfterStep

    def log_metrics(self, metrics: dict[str, float]) -> None:
        self.after_step()

    def end_of_epoch(self, state: State, epochs: float, losses: dict[str, float]) -> None:
        return None


def settings(rows: str) -> ObjectiveConfig:
    terms: dict[str, Any] = {name: {"weight": weight} for name, weight in WEIGHTS.items()}
    terms["soft"] |= {"rows": rows, "temperature": TEMPERATURE}
    return objective_config(terms)


def train_with_distill(
    source: Batches, pair: tuple[Any, Any], variant: Variant, steps: int, after_step: AfterStep
) -> None:
    """The loop of a run, `distill.train.train`, with what a run builds for it."""
    (teacher, student), config = pair, settings(variant.rows)
    backend = Single(BackendConfig(device=str(student.device)))
    terms = make_terms(config)
    fit_terms(terms, student, teacher)
    many = 0 if "eager" in variant.name else 10**9  # positions: from that many on the objective is compiled
    objective = build_objective(terms, config, variant.precision, student.config.vocab_size, many, backend.device)
    trainable, frozen = setup_models(student, teacher, objective, variant.precision, backend)
    assert frozen is not None
    optimizer = OptimizerConfig()
    with tempfile.TemporaryDirectory() as folder:
        train(
            Training(
                trainable, LiveTeacher(frozen), source, objective, optim.build(trainable, optimizer), backend, State(),
                TrainConfig(epochs=None, steps=steps + 1, save_every=steps + 1), ScheduleConfig(kind="constant"),
                optimizer, Checkpoints(Path(folder), 1, {}), CallAfterStep(after_step),
            )
        )  # fmt: skip


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


def operations(shape: Shape, rows: str) -> float:
    """Matrix operations of one micro-batch: a forward is 1, a forward with its backward 3."""
    tokens, width = shape.rows * shape.tokens, shape.width
    layer = 24 * width**2 + 4 * shape.tokens * width
    chosen = tokens if rows == "all" else round(0.15 * tokens)
    head = 2 * width * (shape.vocabulary + width)
    return float(tokens * layer * (shape.teacher_layers + 3 * shape.student_layers) + chosen * head * (1 + 3))


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


class Over(Exception):
    """Enough steps were timed."""


def serve(calls: Connection, shape: Shape, variant: Variant, options: argparse.Namespace) -> None:
    """One variant in a process of its own, as its user would run it: answers each call with a step's seconds."""
    device = torch.device(options.device)
    if options.threads:
        torch.set_num_threads(options.threads)
    began, steps = 0.0, 0

    def after_step() -> None:
        nonlocal began, steps
        wait(device)
        seconds = time.perf_counter() - began
        steps += 1
        if steps >= WARM_UP:  # compiled, and malloc has found its size
            calls.send(seconds)
            if not calls.recv():
                raise Over
        began = time.perf_counter()

    pair = make_teacher(shape, device), make_student(shape, device)
    loop, steps_at_most = train_plainly if variant.plain else train_with_distill, WARM_UP + options.rounds + 1
    with contextlib.suppress(Over):
        loop(batches(shape, options.accumulate, steps_at_most), pair, variant, steps_at_most, after_step)
    on_gpu = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    calls.send(on_gpu or 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)


def measure(shape: Shape, rows: str, options: argparse.Namespace, device: torch.device) -> list[dict[str, Any]]:
    """All variants take turns, and between the rounds the matrix rate is measured."""
    chosen = [v for v in variants(rows, device, options.compile) if re.search(options.only, v.name)]
    spawn, calls, processes = multiprocessing.get_context("spawn"), [], []
    for variant in chosen:
        own, other = spawn.Pipe()
        process = spawn.Process(target=serve, args=(other, shape, variant, options), daemon=True)
        process.start()
        own.recv()
        calls.append(own)
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
                "rows": rows,
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
    limit_spinning()  # as a run does; the processes of the variants inherit it
    if options.threads:
        torch.set_num_threads(options.threads)
    device = torch.device(options.device)
    shapes = options.shapes or ("base-512,base" if device.type == "cuda" else "base,small,embedded")
    results: list[dict[str, Any]] = []
    for name in shapes.split(","):
        for rows in options.rows.split(","):
            results += measure(SHAPES[name], rows, options, device)
    print(
        "milliseconds per micro-batch; matrix rate in Gop/s, fp32 or bf16 as the student's; the process's peak memory\n"
    )
    print(table(["shape", "step", "ms", "times as fast as plain fp32", "of the floor", "rate", "GiB"], lines(results)))
    save(options.json, results)


if __name__ == "__main__":
    main()
