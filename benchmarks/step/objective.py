"""Time and peak memory of the objective: plain losses on full logits against the one visit of `objective.chunked`.

Both make soft and mlm losses and the gradients for rows, head weight and bias; 15 % of the rows have an mlm target.
Times are medians of interleaved runs. The floor is the matrix work divided by the rate measured in the same run.
"""

import argparse
import ctypes
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear

from benchmarks.common import save, title
from distill.models.language_model import Head
from distill.objective import losses
from distill.objective.chunked import NO_TARGET, ChunkedLosses
from distill.objective.terms.mlm import Mlm
from distill.objective.terms.soft import Soft

TEMPERATURE = 2.0


class Shape(NamedTuple):
    rows: int
    vocabulary: int
    student_width: int
    teacher_width: int


CPU_SHAPES = [
    Shape(512, 6144, 256, 256),
    Shape(2048, 6144, 256, 256),
    Shape(4096, 6144, 256, 256),
    Shape(154, 30522, 768, 768),
    Shape(1024, 30522, 768, 768),
    Shape(4096, 30522, 768, 768),
]
GPU_SHAPES = [
    Shape(1024, 30522, 768, 768),
    Shape(8192, 30522, 768, 768),
    Shape(1024, 128256, 2048, 4096),
    Shape(8192, 128256, 2048, 4096),
]


@dataclass
class Result:
    """One row of the table; seconds and bytes by path."""

    shape: Shape
    dtype: str
    floor_seconds: float
    seconds: dict[str, float] = field(default_factory=dict)
    peak_bytes: dict[str, int] = field(default_factory=dict)


@dataclass
class Problem:
    student: Head
    teacher: Head
    targets: Tensor
    dtype: torch.dtype

    @classmethod
    def random(cls, shape: Shape, dtype: torch.dtype, device: str) -> "Problem":
        def values(*sizes: int, trained: bool, scale: float = 1.0) -> Tensor:
            return (torch.randn(*sizes, device=device) * scale).requires_grad_(trained)

        def head(width: int, trained: bool) -> Head:
            weight = values(shape.vocabulary, width, trained=trained, scale=width**-0.5)
            bias = values(shape.vocabulary, trained=trained)
            return Head(values(shape.rows, width, trained=trained), weight, bias, dtype)

        targets = torch.randint(shape.vocabulary, (shape.rows,), device=device)
        targets[torch.rand(shape.rows, device=device) > 0.15] = NO_TARGET
        return cls(head(shape.student_width, True), head(shape.teacher_width, False), targets, dtype)

    def plain(self) -> Tensor:
        """Full logits of both heads, under autocast where the format is not fp32."""
        device = self.targets.device.type
        with torch.autocast(device, self.dtype, enabled=self.dtype != torch.float32):
            student_logits = linear(*self.student[:3])
            with torch.no_grad():
                teacher_logits = linear(*self.teacher[:3])
        soft = losses.soft(student_logits, teacher_logits, TEMPERATURE).sum()
        return soft / len(self.targets) + losses.mlm(student_logits, self.targets).sum() / 100

    def fused(self, compiled: bool) -> Tensor:
        scales = torch.tensor([1 / len(self.targets), 1 / 100], device=self.targets.device)
        losses_in_chunks = ChunkedLosses([Soft(TEMPERATURE), Mlm()], len(self.student.weight), compiled)
        return losses_in_chunks(self.student, self.teacher, self.targets, scales)[0]

    def paths(self) -> dict[str, Callable[[], Tensor]]:
        return {"plain": self.plain, "fused": lambda: self.fused(False), "compiled": lambda: self.fused(True)}

    def seconds(self, rounds: int) -> dict[str, float]:
        """Medians by path; the first round, which compiles and warms up, is left out."""
        times: dict[str, list[float]] = {name: [] for name in self.paths()}
        for _ in range(rounds + 1):
            for name, path in self.paths().items():
                times[name].append(timed(partial(self.run, path)))
        return {name: statistics.median(values[1:]) for name, values in times.items()}

    def run(self, path: Callable[[], Tensor]) -> None:
        """Forward, backward, and the gradients thrown away."""
        path().backward()
        for tensor in (self.student.rows, self.student.weight, self.student.bias):
            if tensor is not None:
                tensor.grad = None
        if self.targets.is_cuda:
            torch.cuda.synchronize()


def timed(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def floor_seconds(shape: Shape, rate: float) -> float:
    """Both heads forward, and two products of the student's head backward, at the given operations per second."""
    return 2 * shape.rows * shape.vocabulary * (3 * shape.student_width + shape.teacher_width) / rate


def matrix_rate(dtype: torch.dtype, device: str) -> float:
    """Operations per second of a product that suits the machine: the best of several."""
    size = 8192 if device == "cuda" else 1536
    left, right, out = (torch.randn(size, size, device=device).to(dtype) for _ in range(3))

    def multiply() -> None:
        torch.mm(left, right, out=out)
        if device == "cuda":
            torch.cuda.synchronize()

    return 2 * size**3 / min(timed(multiply) for _ in range(10))


def peak_bytes(run: Callable[[], None], device: str) -> int:
    """Most memory in use above what was in use before: of torch on a GPU, of the whole process (Linux) otherwise."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        return torch.cuda.max_memory_allocated() - before
    libc = ctypes.CDLL(None)
    libc.mallopt(-3, 1 << 16)  # M_MMAP_THRESHOLD: freed tensors leave the process, so that nothing hides in the heap
    libc.malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # sets the high-water mark back
    before = _status("VmRSS")
    run()
    return _status("VmHWM") - before


def _status(name: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


def show(result: Result) -> str:
    plain_seconds, plain_bytes = result.seconds["plain"], result.peak_bytes["plain"]
    cells = [
        f"{name} {seconds * 1e3:8.1f} ms ({plain_seconds / seconds:4.2f}x) {result.peak_bytes[name] / 2**20:7.0f} MiB"
        f" (1/{plain_bytes / result.peak_bytes[name]:.1f})"
        for name, seconds in result.seconds.items()
    ]
    shape = "x".join(map(str, result.shape))
    return f"{shape:22s} {result.dtype:8s} floor {result.floor_seconds * 1e3:8.1f} ms | " + " | ".join(cells)


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--shapes", nargs="+", help="ROWSxVOCABULARYxSTUDENT_WIDTHxTEACHER_WIDTH")
    options = parser.parse_args()
    given = [Shape(*map(int, shape.split("x"))) for shape in options.shapes or ()]
    shapes = given or (GPU_SHAPES if device == "cuda" else CPU_SHAPES)
    print(title())
    measured = []
    for dtype in (getattr(torch, name) for name in options.dtypes):
        rate = matrix_rate(dtype, device)
        print(f"{dtype}: {rate / 1e9:.0f} GFLOP/s")
        for shape in shapes:
            torch.manual_seed(0)
            result = Result(shape, str(dtype).split(".")[1], floor_seconds(shape, rate))
            result.seconds = Problem.random(shape, dtype, device).seconds(options.rounds)
            measured.append((result, dtype))
    for result, dtype in measured:  # after all timing, since `peak_bytes` slows the allocator down
        problem = Problem.random(result.shape, dtype, device)
        for name, path in problem.paths().items():
            result.peak_bytes[name] = peak_bytes(partial(problem.run, path), device)
        print(show(result), flush=True)
    results = [{**asdict(result), "shape": result.shape._asdict()} for result, _ in measured]
    save(options.json, results)


if __name__ == "__main__":
    main()
