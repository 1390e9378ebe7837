"""The cost model against published hours and measured steps, and its tables from 8 to 4,096 GPUs.

    python benchmarks/scaling/projection.py                  # published hours beside the projection; seconds
    python benchmarks/scaling/projection.py --tables         # three runs on 8 to 4,096 GPUs
    python benchmarks/scaling/projection.py --measure        # steps that the fit has not seen, here; 5 minutes
    sudo python benchmarks/scaling/scaling.py                # exchanges that the fit has not seen, on emulated hosts

Published: a V100's share of its rate comes from NVIDIA's pre-training of BERT-large on one GPU, links and start are
assumed; ALBERT's hours on 8 to 64 V100s and T4s are then predicted. Measured: the share of the matrix rate is fitted to
one pair of models on one core, and predicts other widths, lengths, rows and families.
"""

import argparse
import math
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AlbertConfig,
    AlbertForPreTraining,
    BertConfig,
    BertForMaskedLM,
    DistilBertConfig,
    DistilBertForMaskedLM,
    LlamaConfig,
    LlamaForCausalLM,
)

from benchmarks.common import save, table, title
from benchmarks.scaling import scaling
from benchmarks.scaling.cost_model.machines import MachineCases, load
from benchmarks.scaling.cost_model.model_shape import ModelShape, shape_of
from benchmarks.scaling.cost_model.run import HEAD, Projection, project, project_all, row
from benchmarks.scaling.cost_model.workload import Frozen, Workload
from benchmarks.step.models import layer_operations

# github.com/aws-samples/deep-learning-models, models/nlp/albert/README.md: ALBERT-base, 125,000 steps of 4,096 rows of
# 512 tokens in mixed precision, by p3dn.24xlarge nodes.
ALBERT_HOURS = {1: 144, 2: 75, 4: 38, 8: 20}
# Of the same training on T4s 78 and 39 hours are published; the number of GPUs was not to be found. Twice as many would
# halve the hours; 64 are as many as the V100s of the 20 hours.
T4_HOURS = {8: 78, 16: 39}
# github.com/NVIDIA/DeepLearningExamples, PyTorch/LanguageModeling/BERT/README.md (19.07): rows a second of BERT-large's
# pre-training on one V100, by tokens of a row: DGX-1 16 GB, DGX-1 32 GB, DGX-2.
BERT_LARGE_ROWS = {
    "fp16": {512: (26.64, 30.08, 32.32), 128: (125.44, 171.52, 181.76)},
    "fp32": {512: (7.56, 8.36, 9.0), 128: (33.36, 40.32, 43.52)},
}
PREDICTIONS = {512: 80, 128: 20}  # of a row, that reach the head
V100 = {"fp16": 125e12, "fp32": 15.7e12}


@dataclass(frozen=True)
class Check:
    """A projection beside what was published."""

    name: str
    found: Projection
    hours: float

    @property
    def error(self) -> float:
        return self.found.hours.usual / self.hours - 1


def model(make: Any, config: Any, length: int) -> ModelShape:
    """The shape of a model, which needs no weights for that."""
    with torch.device("meta"):
        return shape_of(make(config).eval(), length)


def albert() -> Workload:
    """The published run with this package's recipe, which sends gradients in bf16 beside a forward in fp16."""
    sizes = {"hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072, "vocab_size": 30_000}
    return Workload(
        student=model(AlbertForPreTraining, AlbertConfig(**sizes), 512),
        precision="fp16", length=512, positions=0.15 * 512, batch_size=32, rows_per_step=4096, steps=125_000,
        wire="bf16", overlaps=False, optimizer="lamb",
        evaluation_rows=3072, evaluation_copies=5.12,  # 1 % of the positions
    )  # fmt: skip


def distilbert() -> Workload:
    """bert-base and its student of six layers: three epochs of 3 B tokens, of which a fiftieth is held out."""
    teacher = Frozen(model(BertForMaskedLM, BertConfig(), 512), "bf16")
    rows = 0.98 * 3e9 / 512
    return Workload(
        student=model(DistilBertForMaskedLM, DistilBertConfig(), 512), teachers=(teacher,), precision="bf16",
        length=512, positions=512, batch_size=16, rows_per_step=8192, steps=3 * math.ceil(rows / 8192), save_every=100,
        evaluations=4, evaluation_rows=3908, evaluation_copies=512,  # pseudo-perplexity of 2 M tokens
    )  # fmt: skip


def large_pair(sharded: bool) -> Workload:
    """A teacher of 70 B parameters and a student of 1.5 B: steps of 8 M tokens, 10 B in all."""
    shapes = []
    for width, inner, layers, heads in ((8192, 28_672, 80, 64), (2048, 5632, 22, 32)):
        config = LlamaConfig(
            vocab_size=128_256, hidden_size=width, intermediate_size=inner, num_hidden_layers=layers,
            num_attention_heads=heads, num_key_value_heads=8,
        )  # fmt: skip
        shapes.append(model(LlamaForCausalLM, config, 2048))
    rows = 0.98 * 10e9 / 2048
    return Workload(
        student=shapes[1], teachers=(Frozen(shapes[0], "bf16", micro_batches=4),), precision="bf16", length=2048,
        positions=2048, batch_size=2, rows_per_step=4096, steps=math.ceil(rows / 4096), sharded=sharded, save_every=500,
        evaluations=2, evaluation_rows=768,
    )  # fmt: skip


def albert_checks() -> list[Check]:
    machine = load()["p3dn.24xlarge"]
    return [Check(f"{8 * n} V100", project(albert(), machine, n), hours) for n, hours in ALBERT_HOURS.items()]


def t4_checks() -> list[Check]:
    machine = load()["g4dn.metal"]
    return [Check(f"{8 * n} T4 (taken to be)", project(albert(), machine, n), hours) for n, hours in T4_HOURS.items()]


def distilbert_checks() -> list[tuple[str, float, float | None, bool]]:
    """Cases of the DistilBERT benchmark: minutes by the model and as published, and whether the fit had them."""
    found = []
    for case, model, published in scaling.projection():
        minutes = None if published == "-" else float(published.removesuffix(" (given)"))
        found.append((case, float(model), minutes, minutes is None or published.endswith("(given)")))
    return found


def reached_shares() -> list[list[str]]:
    """What a V100 reaches of its rate with BERT-large, by format and length: rows of a table."""
    rows = []
    for name, by_length in BERT_LARGE_ROWS.items():
        for length, rates in by_length.items():
            head = PREDICTIONS[length] * 2 * 1024 * (30528 + 1024)
            operations = 3 * (24 * length * layer_operations(1024, 4096, length) + head)
            shares = [f"{rate * operations / V100[name]:.0%}" for rate in rates]
            rows.append([f"{name}, {length} tokens", f"{operations / 1e9:.0f}", *shares])
    return rows


def print_published() -> None:
    print("\nWhat one V100 reaches of its rate: BERT-large, as NVIDIA published it\n")
    print(table(["format, row", "Gop a row", "DGX-1 16 GB", "DGX-1 32 GB", "DGX-2"], reached_shares()))
    print("\nALBERT-base, 125,000 steps of 4,096 rows of 512 tokens: hours\n")
    rows = []
    for check in (*albert_checks(), *t4_checks()):
        hours = check.found.hours
        scope = f"{hours.least:.1f} to {hours.most:.1f}"
        inside = "yes" if hours.least <= check.hours <= hours.most else "no"
        rows.append([check.name, f"{hours.usual:.1f}", scope, str(check.hours), f"{check.error:+.0%}", inside])
    print(table(["GPUs", "projected", "range", "published", "error", "within the range"], rows))
    print("\nThe DistilBERT benchmark: minutes, compute and exchange from the four entries that are given\n")
    rows = []
    for case, model, minutes, given in distilbert_checks():
        error = "-" if minutes is None else "given" if given else f"{model / minutes - 1:+.0%}"
        rows.append([case, f"{model:.1f}", "-" if minutes is None else f"{minutes:.0f}", error])
    print(table(["case", "model", "published", "error"], rows))


def print_tables() -> None:
    """From 8 to 4,096 GPUs: the DistilBERT benchmark's pair, ALBERT's, and one that is larger than a GPU."""
    machines = load()
    h100 = machines["p5.48xlarge"]
    print("\nbert-base to DistilBERT, 3 epochs of 3 B tokens, steps of 8,192 rows; p5.48xlarge\n")
    print_table(distilbert(), h100)
    print("\nALBERT-base, 125,000 steps of 4,096 rows of 512 tokens; p3dn.24xlarge\n")
    print_table(albert(), machines["p3dn.24xlarge"])
    print("\nLlama, 70 B to 1.5 B, 10 B tokens, steps of 4,096 rows of 2,048, both models sharded; p5.48xlarge\n")
    print_table(large_pair(sharded=True), h100)
    needs = project(large_pair(sharded=False), h100, 1).run.step.memory / 1e9
    print(f"\nNot sharded, a GPU needs {needs:.0f} GB and has {h100.usual.memory / 1e9:.0f}.")


def print_table(work: Workload, machine: MachineCases) -> None:
    print(table(HEAD, [row(projection, work) for projection in project_all(work, machine)]))


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Micro-batches of several pairs on one core, each in a process of its own; all take turns.

    The matrix rate is that of `step/step.py`, measured in the same rounds. Which share of it a step reaches is fitted
    to the first shape alone.
    """
    from benchmarks.step.models import SHAPES, Shape
    from benchmarks.step.step import matrix_rate, serve, start, variants

    device = torch.device("cpu")
    torch.set_num_threads(options.threads)
    options.device, options.compile = "cpu", False
    small = SHAPES["small"]
    cases: dict[str, tuple[Shape, str]] = {
        "fitted: 4 x 192 -> 2 x 192, 16 x 128": (SHAPES["bundled"], "all"),
        "masked rows alone": (SHAPES["bundled"], "masked"),
        "32 rows of 64": (SHAPES["bundled"]._replace(rows=32, tokens=64), "all"),
        "4 rows of 512": (SHAPES["bundled"]._replace(rows=4, tokens=512), "all"),
        "4 x 256 -> 2 x 256, V 8,192": (small, "all"),
        "8 x 384 -> 4 x 384, V 8,192": (Shape(8, 4, 384, 8192, 8, 128), "masked"),
        "bert-base -> DistilBERT, 2 x 128": (SHAPES["base"]._replace(rows=2), "masked"),
        "GPT-2 4 x 256 -> 2 x 256": (SHAPES["gpt2-small"], "targets"),
    }
    plain = next(each for each in variants("all", device, False) if each.name == "distill fp32")
    calls, processes = start(serve, [(shape, plain._replace(rows=rows), options) for shape, rows in cases.values()])
    seconds: list[list[float]] = [[] for _ in cases]
    rates = []
    for _ in range(options.rounds):
        rates.append(matrix_rate(small, torch.float32, device))
        for call, times in zip(calls, seconds, strict=True):
            call.send(True)
            times.append(call.recv() / options.accumulate)
    for call in calls:
        call.send(False)
        call.recv()
    for process in processes:
        process.join()
    return _fitted(cases, seconds, statistics.median(rates))


def _fitted(cases: dict[str, Any], seconds: list[list[float]], rate: float) -> list[dict[str, Any]]:
    """The share of the first case, and what it predicts for all."""
    operations = [_operations(*case) for case in cases.values()]
    medians = [statistics.median(times) for times in seconds]
    share = operations[0] / rate / medians[0]
    return [
        {"case": name, "operations": count, "rate": rate, "share": share, "predicted": count / (share * rate),
         "seconds": median, "all": times}
        for name, count, median, times in zip(cases, operations, medians, seconds, strict=True)
    ]  # fmt: skip


def _operations(shape: Any, rows: str) -> float:
    """Of a micro-batch, counted as a projection counts them."""
    from benchmarks.step.models import make_student, make_teacher

    chosen = {"all": 1.0, "masked": 0.15, "targets": (shape.tokens - shape.documents) / shape.tokens}
    with torch.device("meta"):
        teacher, student = (
            shape_of(make(shape, torch.device("meta")).eval(), shape.tokens) for make in (make_teacher, make_student)
        )
    positions = chosen[rows] * shape.tokens
    return shape.rows * (teacher.operations(positions) + 3 * student.operations(positions))


def print_measured(results: list[dict[str, Any]], options: argparse.Namespace) -> None:
    print(
        f"\n{title()}, {options.threads} of them used; fp32, {options.rounds} rounds in turns. Matrix rate "
        f"{results[0]['rate'] / 1e9:.0f} Gop/s, of which the first case reaches {results[0]['share']:.0%}\n"
    )
    rows = [
        [
            each["case"],
            f"{each['operations'] / 1e9:.1f}",
            f"{1000 * each['predicted']:.0f}",
            f"{1000 * each['seconds']:.0f}",
            f"{1000 * min(each['all']):.0f} to {1000 * max(each['all']):.0f}",
            "given" if number == 0 else f"{each['predicted'] / each['seconds'] - 1:+.0%}",
        ]
        for number, each in enumerate(results)
    ]
    print(table(["case", "Gop a micro-batch", "predicted, ms", "measured, ms", "rounds", "error"], rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", action="store_true")
    parser.add_argument("--measure", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches of a measured step")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results: list[dict[str, Any]] = []
    if options.measure:
        results = measure(options)
        print_measured(results, options)
    elif options.tables:
        print_tables()
    else:
        print_published()
    save(options.json, results)


if __name__ == "__main__":
    main()
