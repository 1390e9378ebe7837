"""The phases of a step: `with phase(FORWARD):` names one for torch.profiler, and for the recorder that times them."""

import os
import socket
import time
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

import torch
from torch.profiler import ProfilerActivity

from distill.config.training import ProfileConfig
from distill.distributed import Ranks
from distill.runs.profile.sampler import Sampler

DATA, SAMPLING, TEACHER, FORWARD, BACKWARD = "data", "sampling", "teacher", "forward", "backward"
EXCHANGE, OPTIMIZER, CHECKPOINT, EVALUATION, OTHER = "exchange", "optimizer", "checkpoint", "evaluation", "other"
PHASES = (DATA, SAMPLING, TEACHER, FORWARD, BACKWARD, EXCHANGE, OPTIMIZER, CHECKPOINT, EVALUATION, OTHER)
TITLES = {name: name for name in PHASES} | {
    DATA: "waiting for data", EXCHANGE: "exchange between ranks", CHECKPOINT: "checkpoints"
}  # fmt: skip

MAX_TRACED = 32  # micro-batches of a trace: each adds a few thousand operations, and the file is to stay small
MAX_OPERATIONS = 30  # in the table, those that take longest
MAX_STEPS = 4096  # the newest ones stay, one by one; of all of them there are sums
UNTYPICAL_STEPS = 3  # at the start: they compile, or touch their memory for the first time
FOLDER = "profile"  # in that of the run


@dataclass(frozen=True)
class RankProfile:
    """What one rank has recorded.

    Attributes:
        steps: seconds of each phase of the newest steps, [N][phases], in the order of `PHASES`; without the first steps
            and those that were traced. All ranks have the same ones.
        totals: seconds of each phase over all steps, `num_steps` of them.
        samples: of the machine, by name (`Sampler.series`).
    """

    rank: int
    host: str
    steps: list[list[float]]
    totals: dict[str, float]
    num_steps: int
    samples: dict[str, list[float]]


class Recorder:
    """Records one rank while it trains: a context around the loop, which reports its phases and steps to it.

    The phases of every step are timed, torch.profiler traces a few steps, and the machine is sampled. On a GPU, which
    computes behind the host, a mark between two phases is an event in its stream: the times are what it computed for
    the phase and what it waited for the host in it.
    """

    def __init__(self, settings: ProfileConfig, run_folder: Path, micro_batches: int, ranks: Ranks) -> None:
        """`micro_batches`: of a step."""
        self.folder, self._ranks, self._sampler = run_folder / FOLDER, ranks, Sampler(ranks.device)
        self._steps: deque[list[float]] = deque(maxlen=MAX_STEPS)
        self._totals, self._num_steps = dict.fromkeys(PHASES, 0.0), 0
        num_traced = min(settings.trace_steps, max(1, MAX_TRACED // micro_batches))
        self._num_untypical = UNTYPICAL_STEPS + (1 + num_traced if num_traced else 0)
        self._tracer = self._make_tracer(num_traced) if num_traced else None
        self._marks: list[tuple[str, Any]] = []  # of the step under way: what begins, and when
        self._unread: list[tuple[str, Any]] = []  # those of the step before

    def __enter__(self) -> Self:
        global _in_force
        self._sampler.start()
        if self._tracer is not None:
            self._tracer.start()
        self._marks, _in_force = [(OTHER, self._now())], self
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        global _in_force
        _in_force = None
        self._sampler.stop()
        if error is not None:  # after which a GPU may answer no more
            return
        if self._tracer is not None:
            self._tracer.stop()
        if self._ranks.device.type == "cuda":
            torch.cuda.synchronize(self._ranks.device)
        self._read()

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """A phase, which interrupts the one that it lies in."""
        outer = self._marks[-1][0]
        with torch.profiler.record_function(phase):
            self._marks.append((phase, self._now()))
            try:
                yield
            finally:
                self._marks.append((outer, self._now()))

    def end_step(self) -> None:
        self._marks.append((OTHER, self._now()))
        self._read()
        self._unread = self._marks
        if self._tracer is not None:
            self._tracer.step()
        self._marks = [(OTHER, self._now())]  # to write a trace takes seconds, which are no part of the run
        self._num_steps += 1

    def record(self) -> RankProfile:
        """What is known by now."""
        samples, host = self._sampler.series(), socket.gethostname()
        return RankProfile(self._ranks.rank, host, list(self._steps), self._totals, self._num_steps, samples)

    def _now(self) -> Any:
        """A mark: seconds of the host's clock, or an event in the GPU's stream."""
        if self._ranks.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._ranks.device))
        return event

    def _read(self) -> None:
        """Take the times of the step before, whose events have all happened: those of this one would be waited for."""
        if not self._unread:
            return
        seconds = dict.fromkeys(PHASES, 0.0)
        for (phase, began), (_, ended) in pairwise(self._unread):
            seconds[phase] += ended - began if isinstance(began, float) else began.elapsed_time(ended) / 1000
        for phase, taken in seconds.items():
            self._totals[phase] += taken
        if self._num_untypical:
            self._num_untypical -= 1
        else:
            self._steps.append([round(taken, 6) for taken in seconds.values()])
        self._unread = []

    def _make_tracer(self, num_steps: int) -> torch.profiler.profile:
        """Traces steps after the first ones, with one before them in which the profiler does its own allocations."""
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # it would write lines of its own between those of the run
        on_gpu = self._ranks.device.type == "cuda"

        def write(profiler: torch.profiler.profile) -> None:
            self.folder.mkdir(parents=True, exist_ok=True)
            name = f"trace-rank-{self._ranks.rank}"
            profiler.export_chrome_trace(str(self.folder / f"{name}.json.gz"))
            order = "self_device_time_total" if on_gpu else "self_cpu_time_total"
            operations = profiler.key_averages().table(sort_by=order, row_limit=MAX_OPERATIONS)
            (self.folder / f"{name}.txt").write_text(operations)

        return torch.profiler.profile(
            activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])],
            schedule=torch.profiler.schedule(skip_first=UNTYPICAL_STEPS, wait=0, warmup=1, active=num_steps, repeat=1),
            on_trace_ready=write,
        )


_in_force: Recorder | None = None
_NOTHING = nullcontext()


def phase(name: str) -> AbstractContextManager[None]:
    """A phase of the step, for the thread of the loop alone; without a recorder nothing is done."""
    return _NOTHING if _in_force is None else _in_force.timed(name)


def end_step() -> None:
    """A step has ended, with its checkpoint and evaluation."""
    if _in_force is not None:
        _in_force.end_step()
