"""Time and peak memory of the objective: plain losses on full logits against the one visit of `objective.chunked`.

Both make soft and mlm losses and the gradients for rows, head weight and bias; 15 % of the rows have an mlm target.
Times are medians of interleaved runs. The floor is the matrix work divided by the rate measured in the same run.
"""

import argparse
import ctypes
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear

from benchmarks.common import Results
from benchmarks.step.models import matrix_rate, wait
from distill.models.language_model import Head
from distill.objective import losses
from distill.objective.chunked import NO_TARGET, ChunkedLosses
from distill.objective.terms.mlm import Mlm
from distill.objective.terms.soft import Soft


class Shape(NamedTuple):
    rows: int
    vocabulary: int
    student_width: int
    teacher_width: int

    @property
    def operations(self) -> int:
        """Both heads forward, and two products of the student's head backward."""
        return 2 * self.rows * self.vocabulary * (3 * self.student_width + self.teacher_width)


SHAPES = (
    Shape(512, 6144, 256, 256),
    Shape(2048, 6144, 256, 256),
    Shape(4096, 6144, 256, 256),
    Shape(154, 30522, 768, 768),
    Shape(1024, 30522, 768, 768),
    Shape(4096, 30522, 768, 768),
)


@dataclass
class Problem:
    """Two heads on given rows: soft targets at all of them, and hard ones at some."""

    student: Head
    teacher: Head
    targets: Tensor
    dtype: torch.dtype
    temperature: float
    scales: tuple[float, float]  # of the sums of both losses

    @classmethod
    def random(cls, shape: Shape, dtype: torch.dtype, device: torch.device) -> "Problem":
        def values(*sizes: int, trained: bool, scale: float = 1.0) -> Tensor:
            return (torch.randn(*sizes, device=device) * scale).requires_grad_(trained)

        def head(width: int, trained: bool) -> Head:
            weight = values(shape.vocabulary, width, trained=trained, scale=width**-0.5)
            bias = values(shape.vocabulary, trained=trained)
            return Head(values(shape.rows, width, trained=trained), weight, bias, dtype)

        torch.manual_seed(0)
        hard = torch.randint(shape.vocabulary, (shape.rows,), device=device)
        hard[torch.rand(shape.rows, device=device) > 0.15] = NO_TARGET
        scales = (1 / shape.rows, 1 / 100)
        return cls(head(shape.student_width, True), head(shape.teacher_width, False), hard, dtype, 2.0, scales)

    @classmethod
    def as_liger(cls, shape: Shape, device: torch.device) -> "Problem":
        """Half the forward divergence at temperature 1 and half the cross-entropy, means over rows without a bias.

        Rows are in bf16, as an encoder under autocast gives them; the student's weight is in fp32, the teacher's in
        bf16, as they are kept.
        """

        def head(width: int, trained: bool) -> Head:
            rows = torch.randn(shape.rows, width, device=device).bfloat16().requires_grad_(trained)
            weight = torch.randn(shape.vocabulary, width, device=device) * width**-0.5
            kept = weight.requires_grad_() if trained else weight.bfloat16()
            return Head(rows, kept, dtype=torch.bfloat16)

        torch.manual_seed(0)
        targets, scales = torch.randint(shape.vocabulary, (shape.rows,), device=device), (0.5 / shape.rows,) * 2
        heads = head(shape.student_width, True), head(shape.teacher_width, False)
        return cls(*heads, targets, torch.bfloat16, 1.0, scales)

    def plain(self) -> Tensor:
        """Full logits of both heads, under autocast where the format is not fp32."""
        device = self.targets.device.type
        with torch.autocast(device, self.dtype, enabled=self.dtype != torch.float32):
            student_logits = linear(*self.student[:3])
            with torch.no_grad():
                teacher_logits = linear(*self.teacher[:3])
        soft, hard = self.scales
        loss = losses.soft(student_logits, teacher_logits, self.temperature).sum() * soft
        return loss + losses.mlm(student_logits, self.targets).sum() * hard

    def fused(self, compiled: bool) -> Tensor:
        scales = torch.tensor(self.scales, device=self.targets.device)
        losses_in_chunks = ChunkedLosses([Soft(self.temperature), Mlm()], len(self.student.weight), compiled)
        return losses_in_chunks(self.student, self.teacher, self.targets, scales)[0]

    def liger(self) -> Tensor:
        from liger_kernel.chunked_loss import LigerFusedLinearJSDLoss

        loss = LigerFusedLinearJSDLoss(beta=0.0, compiled=self.targets.is_cuda)
        heads = self.student.rows, self.student.weight.bfloat16(), self.teacher.rows, self.teacher.weight
        value: Tensor = loss(*heads, self.targets)
        return value

    def paths(self) -> dict[str, Callable[[], Tensor]]:
        return {"plain": self.plain, "fused": lambda: self.fused(False), "compiled": lambda: self.fused(True)}

    def run(self, path: Callable[[], Tensor]) -> dict[str, Tensor]:
        """Forward and backward: the loss and the gradients, of which the tensors keep none."""
        found = {"loss": path()}
        found["loss"].backward()
        for name in ("rows", "weight", "bias"):
            leaf = getattr(self.student, name)
            if leaf is not None:
                found[name], leaf.grad = leaf.grad, None
        return {name: value.detach() for name, value in found.items()}

    def run_to_end(self, path: Callable[[], Tensor]) -> None:
        self.run(path)
        wait(self.targets.device)


def medians(paths: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Seconds of each, in turns; the first round, which compiles and warms up, is left out."""
    times: dict[str, list[float]] = {name: [] for name in paths}
    for _ in range(rounds + 1):
        for name, path in paths.items():
            times[name].append(timed(path))
    return {name: statistics.median(values[1:]) for name, values in times.items()}


def timed(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def peak_bytes(run: Callable[[], object], device: torch.device) -> int:
    """Most memory in use above what was in use before: of torch on a GPU, of the whole process (Linux) otherwise."""
    if device.type == "cuda":
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


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--shapes", nargs="+", help="ROWSxVOCABULARYxSTUDENT_WIDTHxTEACHER_WIDTH")


def run(options: argparse.Namespace, results: Results) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shapes = [Shape(*map(int, shape.split("x"))) for shape in options.shapes or ()] or SHAPES
    measured = []
    for dtype in (getattr(torch, name) for name in options.dtypes):
        rate = matrix_rate(dtype, device)
        for shape in shapes:
            problem = Problem.random(shape, dtype, device)
            runs = {name: partial(problem.run_to_end, path) for name, path in problem.paths().items()}
            measured.append((shape, dtype, rate, medians(runs, options.rounds)))
    for shape, dtype, rate, seconds in measured:  # after all timing, since `peak_bytes` slows the allocator down
        problem = Problem.random(shape, dtype, device)
        peaks = {name: peak_bytes(partial(problem.run_to_end, path), device) for name, path in problem.paths().items()}
        for name in seconds:
            results.row(
                shape="x".join(map(str, shape)),
                format=str(dtype).removeprefix("torch."),
                path=name,
                milliseconds=1000 * seconds[name],
                as_fast_as_plain=seconds["plain"] / seconds[name],
                of_the_floor=shape.operations / rate / seconds[name],
                mib=peaks[name] / 2**20,
                memory_of_plain=peaks[name] / peaks["plain"],
            )
