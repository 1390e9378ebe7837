"""A training step of Distill against a plain one with full logits (`plain.py`), and against its own floor.

    python benchmarks/step/step.py                        # the shapes of this device
    python benchmarks/step/step.py --shapes small --threads 1
    python benchmarks/step/step.py --shapes gpt2,gpt2-small    # causal pairs

What is timed is the loop of `distill.train` itself, from one call of its observer to the next. The plain step asks both
models for all logits and hidden states, selects positions with boolean masks and reduces with torch's own losses. Both
train the same models on the same batches: soft targets (T = 2), masked or next words, cosine, gradients of several
micro-batches (`--accumulate`) added up, clipping, AdamW. Each variant has its own process; all take turns; times are
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
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from benchmarks.common import save, table
from benchmarks.step.models import SHAPES, AfterStep, Shape, Variant, batches, make_student, make_teacher, operations
from benchmarks.step.plain import TEMPERATURE, WEIGHTS, train_plainly
from distill.config.settings import (
    BackendConfig,
    Config,
    ObjectiveConfig,
    OptimizerConfig,
    PrecisionConfig,
    TrainConfig,
)
from distill.data.batches import Batches
from distill.distributed import gradient_sync
from distill.distributed.single import Single
from distill.objective.build import bind_terms, build_objective, make_terms
from distill.optim import updates as optim
from distill.optim.schedule import Schedule
from distill.optim.schedules.constant import Constant
from distill.runs.checkpoint import Checkpoints
from distill.runs.facts import HistoryPoint
from distill.runs.learning import Learner
from distill.runs.run import Run
from distill.runs.setup import setup_student, setup_teacher
from distill.runs.state import State
from distill.runs.step import Callback, StepResult
from distill.runtime.host import limit_spinning
from distill.teacher.live import LiveTeacher
from distill.train import Training, train

WARM_UP = 2  # steps


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
    if more:
        compiled = PrecisionConfig(student="bf16", teacher="bf16", compile=True)
        found.append(Variant("distill bf16, models compiled", rows, compiled))
    return found


@dataclass
class CallAfterStep(Callback):
    """Calls something after each step of `distill.train`."""

    call: AfterStep

    def after_step(self, step: StepResult) -> None:
        self.call()


class NoEvaluation:
    """Stands for the evaluations of `distill.train`, and scores nothing."""

    def due(self, step: int) -> bool:
        return False

    def evaluate(self, state: State, losses: dict[str, float]) -> HistoryPoint:
        return HistoryPoint()


def settings(rows: str, task: str = "mlm") -> ObjectiveConfig:
    terms: dict[str, Any] = {name: {"weight": WEIGHTS[name]} for name in ("soft", task, "cosine")}
    terms["soft"] |= {"positions": rows, "temperature": TEMPERATURE}
    return ObjectiveConfig(task=task, **terms)


class Plan(NamedTuple):
    """What a run trains by."""

    objective: ObjectiveConfig
    precision: PrecisionConfig
    num_positions: int = 10**9  # of the run: where there are many the objective is compiled
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: Schedule = Constant()


def train_with_distill(
    source: Batches, pair: tuple[Any, Any], variant: Variant, steps: int, after_step: AfterStep
) -> None:
    """The loop of a run with the loss that the plain step has."""
    task = next(iter(source.window(0)[0].labels))
    plan = Plan(settings(variant.rows, task), variant.precision)
    train_by_plan(source, pair, plan._replace(num_positions=0) if "eager" in variant.name else plan, steps, after_step)


def train_by_plan(source: Batches, pair: tuple[Any, Any], plan: Plan, steps: int, after_step: AfterStep) -> None:
    """The loop of a run, `distill.train.train`, with what a run builds for it."""
    teacher, student = pair
    ranks = Single(BackendConfig(device=str(student.device)))
    terms = bind_terms(make_terms(plan.objective), student, teacher)
    vocabulary, device = student.config.vocab_size, ranks.device
    objective = build_objective(terms, plan.objective, plan.precision, vocabulary, plan.num_positions, device)
    frozen = setup_teacher(teacher, plan.precision, ranks)
    trainable = setup_student(student, objective, plan.precision, ranks)
    sync, optimizer = gradient_sync(ranks, trainable), optim.build(trainable, plan.optimizer)
    with tempfile.TemporaryDirectory() as folder:
        length = TrainConfig(epochs=None, steps=steps + 1, save_every=steps + 1)
        learner = Learner(trainable, sync, optimizer, plan.schedule, plan.optimizer)
        of_folder: Any = SimpleNamespace(checkpoints=Checkpoints(Path(folder), 1, {}, ranks))
        of_data: Any = SimpleNamespace(batches=source)
        nothing: Any = None
        config = Config(train=length)
        run = Run(config, {}, nothing, nothing, of_data, objective, {}, None, of_folder, ranks)
        nowhere: Any = NoEvaluation()
        train(Training(run, learner, LiveTeacher(frozen), State(), (CallAfterStep(after_step),), nowhere))


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


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


class Over(Exception):
    """Enough steps were timed."""


def serve(calls: Connection, shape: Shape, variant: Variant, options: argparse.Namespace) -> None:
    """One variant in a process of its own, as its user would run it."""
    device = torch.device(options.device)
    loop = train_plainly if variant.plain else train_with_distill

    def train_for(steps: int, after_step: AfterStep) -> None:
        pair = make_teacher(shape, device), make_student(shape, device)
        loop(batches(shape, options.accumulate, steps), pair, variant, steps, after_step)

    answer(calls, options, train_for)


def answer(calls: Connection, options: argparse.Namespace, train_for: Callable[[int, AfterStep], None]) -> None:
    """Answer each call with a step's seconds, and the last with the peak of memory in bytes."""
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

    with contextlib.suppress(Over):
        train_for(WARM_UP + options.rounds + 1, after_step)
    on_gpu = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    calls.send(on_gpu or 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)


def start(target: Callable[..., None], arguments: list[tuple[Any, ...]]) -> tuple[list[Connection], list[Any]]:
    """A process for each variant, one after the other until it is warm; they get their end of a pipe first."""
    spawn, calls, processes = multiprocessing.get_context("spawn"), [], []
    for each in arguments:
        own, other = spawn.Pipe()
        process = spawn.Process(target=target, args=(other, *each), daemon=True)
        process.start()
        other.close()  # so that the end of the process is an error here, and no waiting
        own.recv()
        calls.append(own)
        processes.append(process)
    return calls, processes


def measure(shape: Shape, rows: str, options: argparse.Namespace, device: torch.device) -> list[dict[str, Any]]:
    """All variants take turns, and between the rounds the matrix rate is measured."""
    chosen = [v for v in variants(rows, device, options.compile) if re.search(options.only, v.name)]
    calls, processes = start(serve, [(shape, variant, options) for variant in chosen])
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
    plain = {(r["shape"], r["rows"], r["variant"]): r["seconds"] for r in results}

    def times_as_fast(r: dict[str, Any], number_format: str) -> str:
        other = plain.get((r["shape"], r["rows"], f"plain {number_format}"))
        return "-" if other is None else f"{other / r['seconds']:.2f}"

    return [
        [
            f"{r['shape']}, {r['rows']} rows",
            r["variant"],
            f"{1000 * r['seconds']:.0f}",
            times_as_fast(r, "fp32"),
            times_as_fast(r, "bf16" if "bf16" in r["variant"] else "fp32"),
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
    parser.add_argument("--rows", default="all,masked", help="that carry soft targets (causal pairs: targets)")
    parser.add_argument("--only", default="", help="variants whose name this regular expression finds")
    parser.add_argument("--compile", action="store_true", help="also with precision.compile=true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    limit_spinning()  # as a run does; the processes of the variants inherit it
    if options.threads:
        torch.set_num_threads(options.threads)
    device = torch.device(options.device)
    shapes = options.shapes or ("base-512,base" if device.type == "cuda" else "base,small,bundled")
    results: list[dict[str, Any]] = []
    for name in shapes.split(","):
        for rows in ["targets"] if SHAPES[name].documents else options.rows.split(","):
            results += measure(SHAPES[name], rows, options, device)
    print(
        "milliseconds per micro-batch; matrix rate in Gop/s, fp32 or bf16 as the student's; the process's peak memory\n"
    )
    print(
        table(
            ["shape", "step", "ms", "as fast as plain fp32", "as plain in its format", "of the floor", "rate", "GiB"],
            lines(results),
        )
    )
    save(options.json, results)


if __name__ == "__main__":
    main()
