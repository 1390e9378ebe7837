"""A training step of Distill against a plain one with full logits, and against its own floor.

    python -m benchmarks.step plain
    python -m benchmarks.step plain --shapes small --threads 1
    python -m benchmarks.step plain --shapes gpt2   # a causal pair

What is timed is the loop of `distill.train` itself, from one call of its observer to the next. The plain step asks both
models for all logits and hidden states, selects positions with boolean masks and reduces with torch's own losses. Both
train the same models on the same batches: soft targets (T = 2), masked or next words, cosine, gradients of several
micro-batches (`--accumulate`) added up, clipping, AdamW. Each variant has its own process; all take turns; times are
medians per micro-batch. The floor is the matrix work that no arrangement of this step can avoid, at the matrix rate
measured in the same run: encoder layers (teacher forward, student forward and backward), attention, and the heads at
the rows that carry a term.
"""

import argparse
import re
import statistics
from contextlib import suppress
from typing import NamedTuple

import torch

from benchmarks.common import Results
from benchmarks.step.models import SHAPES, Shape, batches, make_student, make_teacher, matrix_rate
from benchmarks.step.training import Variant, train_variant
from benchmarks.step.turns import WARM_UP, Over, Turns, Worker, take_turns
from distill.config.settings import PrecisionConfig
from distill.runtime.host import limit_spinning

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Job(NamedTuple):
    """What a process trains."""

    shape: Shape
    variant: Variant
    device: str
    accumulate: int
    rounds: int


def train(job: Job, turns: Turns) -> None:
    """In a process of its own, as its user would run it."""
    device, steps = torch.device(job.device), WARM_UP + job.rounds + 1
    pair = make_teacher(job.shape, device), make_student(job.shape, device)
    with suppress(Over):
        train_variant(batches(job.shape, job.accumulate, steps), pair, job.variant, steps, turns.after_step)


def variants(rows: str) -> list[Variant]:
    """The plain step comes first: the others are compared with it."""
    fp32, bf16 = PrecisionConfig(), PrecisionConfig(student="bf16", teacher="bf16")
    return [
        Variant("plain fp32", rows, fp32, plain=True),
        Variant("plain bf16", rows, bf16, plain=True),
        Variant("distill fp32", rows, fp32),
        Variant("distill bf16", rows, bf16),
        Variant("distill bf16, eager objective", rows, bf16),
    ]


def measure(shape: Shape, rows: str, options: argparse.Namespace, results: Results) -> None:
    """All variants take turns, and between the rounds the matrix rate is measured."""
    chosen = [v for v in variants(rows) if re.search(options.only, v.name)]
    jobs = [Job(shape, variant, options.device, options.accumulate, options.rounds) for variant in chosen]
    workers = [Worker("benchmarks.step.beside_plain:train", job, options.threads) for job in jobs]
    tokens, width, device = shape.rows * shape.tokens, shape.width, torch.device(options.device)
    sizes = [(tokens, *each) for each in ((width, 4 * width), (4 * width, width), (width, shape.vocabulary))]
    rates: dict[str, list[float]] = {name: [] for name in DTYPES}

    def measure_rates() -> None:
        for name, dtype in DTYPES.items():
            rates[name].append(matrix_rate(dtype, device, sizes, times=3))

    seconds = take_turns(workers, lambda own: len(own) == options.rounds, measure_rates)
    head_tokens = {"all": tokens, "masked": round(0.15 * tokens), "targets": tokens - shape.rows * shape.documents}
    floor_work = shape.operations(head_tokens[rows])
    plain: dict[str, float] = {}
    for variant, times, worker in zip(chosen, seconds, workers, strict=True):
        kind = variant.precision.student
        own, rate = statistics.median(times) / options.accumulate, statistics.median(rates[kind])
        if variant.plain:
            plain[kind] = own
        ratios = {name: plain[key] / own for name, key in (("fp32", "fp32"), ("its_format", kind)) if key in plain}
        results.row(
            shape=f"{shape}, {rows} rows",
            step=variant.name,
            milliseconds=1000 * own,
            **{f"as_fast_as_plain_{name}": ratio for name, ratio in ratios.items()},
            of_the_floor=floor_work / rate / own,
            gigaoperations=rate / 1e9,
            seconds_of_steps=times,
        )
        worker.end()


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--shapes", default="base,small,bundled", help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--accumulate", type=int, default=8, help="micro-batches per step")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--rows", default="all,masked", help="that carry soft targets (causal pairs: targets)")
    parser.add_argument("--only", default="", help="variants whose name this regular expression finds")


def run(options: argparse.Namespace, results: Results) -> None:
    limit_spinning()  # as a run does
    if options.threads:
        torch.set_num_threads(options.threads)
    for name in options.shapes.split(","):
        for rows in ["targets"] if SHAPES[name].documents else options.rows.split(","):
            measure(SHAPES[name], rows, options, results)
