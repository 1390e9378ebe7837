"""The parts of `gpu.py`, each in a process of its own, and the rows that they write."""

import argparse
import contextlib
import gc
import itertools
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import ROOT, Results, version_of
from benchmarks.step.models import Shape, wait

NEEDS = {
    "liger": "liger_kernel",
    "trl": "trl",
    "distill, teacher in int8": "torchao",
    "distill, teacher in fp8": "torchao",
}
GIB = 2**30


@dataclass(frozen=True)
class Sizes:
    """What is measured: on a GPU sizes that fill it, on a CPU such as try the script."""

    rounds: int  # timed repetitions, after `warm_up` others
    warm_up: int
    matrix: int  # rows and columns
    copied: int  # bytes
    head: tuple[int, int, int]  # rows, vocabulary, width
    causal: dict[str, int]  # of a Qwen3
    causal_batch: tuple[int, int]  # sequences, tokens
    masked: Shape
    run: tuple[str, ...]  # settings of the main job
    killed_run: tuple[int, int]  # steps, and between two checkpoints


QWEN = {"hidden_size": 2048, "intermediate_size": 6144, "num_attention_heads": 16, "num_key_value_heads": 8}
QWEN |= {"head_dim": 128, "num_hidden_layers": 28, "vocab_size": 151_936, "max_position_embeddings": 4096}
SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
SMALL |= {"head_dim": 16, "num_hidden_layers": 4, "vocab_size": 1000, "max_position_embeddings": 64}
LESS = ("corpus.max_sequences=64", "train.steps=2", "train.epochs=null", "evaluate.max_sequences=8")
LESS += ("student.layers=[0,3,6]",)
SIZES = {
    "cuda": Sizes(
        20, 4, 8192, 4 * GIB, (8192, 151_936, 2048), QWEN, (8, 1024), Shape(12, 6, 768, 30522, 32, 512), (), (60, 5)
    ),
    "cpu": Sizes(3, 2, 128, GIB // 32, (128, 1000, 64), SMALL, (2, 32), Shape(2, 1, 64, 500, 2, 16), LESS, (12, 4)),
}
# A quick run, for what it does and not for how fast; five steps.
QUICK = ("+recipe=smoke", "train.steps=5", "train.epochs=null", "evaluate.max_sequences=8")
QUICK += ("train.sequences_per_step=8", "report.every=0")


class OutOfTime(BaseException):
    """The limit of a row has struck; no `except Exception` on the way may take it for its own."""


def _strike(*_: object) -> None:
    raise OutOfTime


class Part:
    """What a part works with: its device and sizes, and how it writes rows."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.name, self.scratch, self.times = options.part, options.scratch, options.times
        self.results = Results(options.out, begun=True)
        self.device, self.sizes = torch.device(options.device), SIZES[options.device]
        self.until = time.monotonic() + options.seconds

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def row(self, what: str, **values: Any) -> None:
        self.results.row(part=self.name, what=what, **values)

    @contextlib.contextmanager
    def case(self, what: str, seconds: float) -> Iterator[dict[str, Any]]:
        """A row of what the body puts into the yielded dictionary, written also where it fails or takes too long."""
        values: dict[str, Any] = {}
        former = signal.signal(signal.SIGALRM, _strike)
        signal.setitimer(signal.ITIMER_REAL, seconds := self.times * seconds)
        began = time.monotonic()
        try:
            yield values
        except OutOfTime:
            values["error"] = f"took more than {seconds:.0f} s"
        except Exception as error:
            values["error"] = f"{type(error).__name__}: {error}"[:600]
            values["where"] = [f"{f.filename}:{f.lineno}" for f in traceback.extract_tb(error.__traceback__)[-4:]]
            traceback.print_exc()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, former)
        self.row(what, **values, took=time.monotonic() - began)
        with contextlib.suppress(RuntimeError):  # a fault of the device, which the next row meets as well
            self.clear()

    def clear(self) -> None:
        """Give back the memory of the last case."""
        gc.collect()
        if self.on_gpu:
            torch.cuda.set_sync_debug_mode("default")  # where a case has failed while its waits were counted
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def peak(self) -> float | None:
        """GiB that torch has held at most since the last `clear`; None on a CPU."""
        return torch.cuda.max_memory_allocated() / GIB if self.on_gpu else None

    def seconds(self, run: Callable[[], object], rounds: int | None = None) -> float:
        """Median time of `run` between two events of the device, after some runs that warm it up."""
        for _ in range(self.sizes.warm_up):
            run()
        marks = [self.mark()]
        for _ in range(rounds or self.sizes.rounds):
            run()
            marks.append(self.mark())
        return statistics.median(self.between(marks))

    def mark(self) -> Any:
        """A point in time, on the device's own clock where it has one."""
        if not self.on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(self, marks: list[Any]) -> list[float]:
        """Seconds from each mark to the next one."""
        wait(self.device)
        pairs = itertools.pairwise(marks)
        return [a.elapsed_time(b) / 1000 if self.on_gpu else b - a for a, b in pairs]

    @property
    def rates(self) -> dict[str, float]:
        """The ceilings: operations a second by number format, bytes a second of memory; empty where not measured."""
        path = self.scratch / "rates.json"
        return json.loads(path.read_text()) if path.exists() else {}


def ceilings(part: Part) -> None:
    """Checkout and card, and what that reaches: matrix products, memory, copies from the host, starts of kernels."""
    with part.case("checkout", 10) as row:
        revision = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
        row["revision"] = revision.stdout.strip() or None
        if part.on_gpu:
            about = torch.cuda.get_device_properties(0)
            row.update(card=about.name, memory=about.total_memory / GIB, processors=about.multi_processor_count)
            row.update(count=torch.cuda.device_count(), cuda=torch.version.cuda, cudnn=torch.backends.cudnn.version())
    rates: dict[str, float] = {}
    size = part.sizes.matrix
    formats = {"bf16": (torch.bfloat16, "highest"), "fp16": (torch.float16, "highest")}
    formats |= {"tf32": (torch.float32, "high"), "fp32": (torch.float32, "highest")}
    for name, (dtype, precision) in formats.items():
        with part.case(f"matrix product, {name}", 8) as row:
            torch.set_float32_matmul_precision(precision)
            a, b = (torch.randn(size, size, device=part.device).to(dtype) for _ in range(2))
            out = torch.empty_like(a)
            rates[name] = 2 * size**3 / part.seconds(lambda a=a, b=b, out=out: torch.mm(a, b, out=out))
            row.update(size=size, tflops=rates[name] / 1e12)
    torch.set_float32_matmul_precision("highest")
    with part.case("memory", 8) as row:
        source = torch.empty(part.sizes.copied // 4, device=part.device).normal_()
        target = torch.empty_like(source)
        rates["memory"] = 2 * part.sizes.copied / part.seconds(lambda: target.copy_(source))  # read and written
        row.update(gb_per_second=rates["memory"] / 1e9)
    with part.case("copy from the host", 8) as row:
        count = part.sizes.copied // 32
        source, target = torch.empty(count, pin_memory=part.on_gpu), torch.empty(count, device=part.device)
        row["gb_per_second"] = 4 * count / part.seconds(lambda: target.copy_(source, non_blocking=True)) / 1e9
    with part.case("start of a kernel", 8) as row:
        one = torch.zeros(1, device=part.device)
        row["microseconds"] = part.seconds(lambda: [one.add_(1) for _ in range(1000)]) * 1000
    (part.scratch / "rates.json").write_text(json.dumps(rates))


def tests(part: Part) -> None:
    """The tests that want a GPU, by name: a row for each, as it ends."""
    files = ["tests/test_gpu.py", *["tests/optim/test_lamb.py"] * part.on_gpu]
    command = [sys.executable, "-m", "pytest", "-o", "addopts=", "-v", "-p", "no:cacheprovider", "-m", "gpu", *files]
    command += [] if part.on_gpu else ["-k", "gradients_are_those"]
    environment = {**os.environ, "DISTILL_TEST_DEVICE": part.device.type, "COLUMNS": "400"}  # reasons in full
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert process.stdout is not None
    began = time.monotonic()
    for line in process.stdout:
        print(line, end="")
        if ended := re.match(r"(tests/\S+::.+?) (PASSED|FAILED|ERROR|SKIPPED)", line):
            part.row(ended[1], outcome=ended[2].lower(), after=time.monotonic() - began)
        elif ended := re.match(r"(?:FAILED|ERROR) (tests/\S+)(?: - (.*))?", line):
            part.row(ended[1], reason=(ended[2] or "")[:600])
        elif re.match(r"=+ .* in [\d.]+s", line):
            part.row("sum", outcome=line.strip("= \n"))
    process.wait()


def objective(part: Part) -> None:
    """Forward divergence and cross-entropy of two heads on given rows, with the gradients of the student's."""
    from benchmarks.step.objective import Problem, Shape

    rows, vocabulary, width = part.sizes.head
    shape = Shape(rows, vocabulary, width, width)
    problem = Problem.as_liger(shape, part.device)
    # Each weight is read, and one gradient written.
    work, moved = shape.operations, vocabulary * width * (4 + 2 + 4) + rows * width * (2 + 2 + 2)
    rates = part.rates
    floor = max(work / rates["bf16"], moved / rates["memory"]) if rates.keys() >= {"bf16", "memory"} else None
    part.row("floor", rows=rows, vocabulary=vocabulary, width=width, seconds=floor, tflop=work / 1e12, bytes=moved)
    expected: dict[str, Any] = {}
    for name in ("plain", "fused", *["compiled"] * part.on_gpu, "liger"):
        if name in NEEDS and version_of(NEEDS[name]) is None:
            part.row(name, error=f"{NEEDS[name]} is not installed")
            continue
        with part.case(name, 45) as row:
            path = (problem.paths() | {"liger": problem.liger})[name]
            found = {key: value.cpu() for key, value in problem.run(path).items()}
            if name == "plain":
                expected = found
            elif expected:
                row["differs"] = {key: _difference(found[key], expected[key]) for key in found}
            del found
            part.clear()
            row["seconds"] = part.seconds(lambda path=path: problem.run(path))
            row.update(peak_gib=part.peak(), of_roofline=floor and floor / row["seconds"])


def _difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The norm of the difference as a fraction of the expected one's."""
    return float((found.float() - expected.float()).norm() / expected.float().norm())


def steps(part: Part) -> None:
    """Training steps of a causal pair of Qwen3's shape and of a BERT-base, beside plain ones and TRL's."""
    from benchmarks.gpu_pairs import CausalPair, Loop, MaskedPair

    causal, masked = CausalPair(part.sizes.causal, *part.sizes.causal_batch), MaskedPair(part.sizes.masked)
    cases: list[tuple[Any, str, float]] = [(causal, "plain", 30), (causal, "distill", 45), (causal, "trl", 30)]
    cases += [(masked, "plain", 20), (masked, "distill", 30)]
    if part.on_gpu:
        cases += [(causal, "distill, teacher in fp8", 30), (causal, "distill, teacher in int8", 30)]
        cases += [(causal, "distill, compiled", 80), (masked, "distill, compiled", 60)]
    for pair, name, seconds in cases:
        if name in NEEDS and version_of(NEEDS[name]) is None:
            part.row(f"{pair.name}, {name}", error=f"{NEEDS[name]} is not installed")
            continue
        for batch in (pair, pair.halved()):  # where the whole batch does not fit
            loop = Loop(part)
            with part.case(f"{batch.name}, {name}", seconds) as row:
                batch.train(name, part.device, loop)
                row.update(loop.results(batch.tokens, batch.operations, part.rates.get("bf16")))
            if "OutOfMemoryError" not in row.get("error", ""):
                break
        torch.compiler.reset()
        part.clear()


def runs(part: Part) -> None:
    """Whole runs as a user starts them, the main job first, and what is done with what they leave."""
    from benchmarks.gpu_runs import Runs

    Runs(part).all()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parts: dict[str, Callable[[Part], None]] = {
        "ceilings": ceilings, "tests": tests, "objective": objective, "steps": steps, "runs": runs,
    }  # fmt: skip
    parser.add_argument("part", choices=parts)
    parser.add_argument("--device", choices=SIZES, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--scratch", type=Path, required=True)
    parser.add_argument("--seconds", type=float, required=True, help="until the part is ended")
    parser.add_argument("--times", type=float, default=1.0, help="multiplies the limit of each row")
    options = parser.parse_args(arguments)
    parts[options.part](Part(options))


if __name__ == "__main__":
    main()
