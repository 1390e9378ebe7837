"""Records one rank while it trains: what the loop and its loader call, with a thread that samples the machine."""

import json
import os
import socket
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from distill.config.training import ProfileConfig
from distill.distributed import Ranks
from distill.runs.profile.loader import LoaderClock
from distill.runs.profile.phases import PHASES, Watcher, Window, phases_on, watched_by
from distill.runs.profile.record import RankProfile
from distill.runs.profile.sampler import INTERVAL, Sampler

# Micro-batches of a trace: each adds a few thousand operations, and the file is to stay at a few megabytes.
MOST_MICRO_BATCHES = 32
MAX_OPERATIONS = 30  # in the table, those that take longest
MOST_STEPS = 4096  # the newest ones stay, one by one; of all of them there are sums
UNTYPICAL_STEPS = 3  # at the start: they compile, or touch their memory for the first time
TRACE_AFTER = 4  # steps of this start of the run
FOLDER = "profile"  # in that of the run


class Trace:
    """Records the steps from `after` on; the phases of a step are above its operations.

    Attributes:
        steps: the numbers of the recorded steps since the start of the run, which take longer by that.
        warm_up: that of the step before, in which the profiler does its own first allocations.
    """

    def __init__(self, path: Path, after: int, steps: int, micro_batches: int, device: torch.device) -> None:
        """`path`: of the trace, NAME.json.gz; `after`: 1 or more; `micro_batches`: of a step."""
        self.path, self._device = path, device
        count = min(steps, max(1, MOST_MICRO_BATCHES // micro_batches))
        self.steps, self.warm_up = range(after, after + count) if steps else range(0), after - 1
        self._profiler: Any = None

    def before_step(self, number: int) -> None:
        """The step of this number, from 0, is about to begin: start, go on or end where it is time."""
        if self.steps and number == self.warm_up:
            self._start()
        elif self._profiler is not None and number >= self.steps.stop:
            self.stop()
        elif self._profiler is not None:
            self._profiler.step()

    def stop(self) -> None:
        """Write what has been recorded, if anything is."""
        if self._profiler is None:
            return
        profiler, self._profiler = self._profiler, None
        profiler.stop()
        if not profiler.step_num:  # in the step that warms up, of which nothing is kept
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(self.path))
        order = "self_device_time_total" if self._device.type == "cuda" else "self_cpu_time_total"
        operations = profiler.key_averages().table(sort_by=order, row_limit=MAX_OPERATIONS)
        self.path.with_suffix("").with_suffix(".txt").write_text(operations)

    def _start(self) -> None:
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # it would write lines of its own between those of the run
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        schedule = torch.profiler.schedule(wait=0, warmup=1, active=len(self.steps), repeat=1)
        self._profiler = torch.profiler.profile(activities=activities, schedule=schedule)
        self._profiler.start()


class Recorder(Watcher):
    """The profile of one rank; a context in which the phases of its steps are timed and the machine is sampled.

    When it ends the rank's own record is written into its run folder, also where the training ended early.
    """

    def __init__(self, settings: ProfileConfig, run_folder: Path, micro_batches: int, rank: Ranks) -> None:
        """`micro_batches`: of a step."""
        self.settings, self.folder, self._rank = settings, run_folder / FOLDER, rank
        trace_path = self.folder / f"trace-rank-{rank.rank}.json.gz"
        self.trace = Trace(trace_path, TRACE_AFTER, settings.trace_steps, micro_batches, rank.device)
        self._watched = ExitStack()
        self._loader, self._sampler = LoaderClock(), Sampler(INTERVAL, rank.device)
        self._steps: deque[list[float]] = deque(maxlen=MOST_STEPS)
        self._totals, self._number, self._taken = [0.0] * len(PHASES), 0, 0

    def __enter__(self) -> Self:
        self._sampler.start()
        self._phases = phases_on(self._rank.device)
        self.trace.before_step(0)
        self._watched.enter_context(watched_by(self))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._watched.close()
        self._sampler.stop()
        if error is None:  # after one a GPU may answer no more
            self.trace.stop()
            self._phases.finish()
        self._take()
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / f"rank-{self._rank.rank}.json").write_text(json.dumps(asdict(self.record())))

    def watch(self, prepare: Callable[[int], Window]) -> Callable[[int], Window]:
        """What prepares the window of a step, timed."""
        return self._loader.watch(prepare)

    def enter(self, phase: str) -> str:
        """The loop enters this phase; gives the one before."""
        return self._phases.enter(phase)

    def end_step(self) -> bool:
        """A step has ended; whether the run is to end with it (`profile.stop_after`)."""
        self._phases.end_step()
        self._number += 1
        self._take()
        self.trace.before_step(self._number)
        self._phases.restart()  # to write a trace takes seconds, which are no part of the run
        return self._number == self.settings.stop_after

    @property
    def is_trial(self) -> bool:
        """Whether the run is for its profile alone, and leaves nothing else."""
        return self.settings.stop_after is not None

    def record(self) -> RankProfile:
        """What is known by now."""
        first = self._taken - len(self._steps)  # after an error the last step of a GPU is never taken
        traced = range(self.trace.warm_up, self.trace.steps.stop + 1) if self.trace.steps else ()
        left_out = {*range(UNTYPICAL_STEPS), *traced}
        return RankProfile(
            rank=self._rank.rank,
            host=socket.gethostname(),
            steps=[[round(seconds, 6) for seconds in step] for step in self._steps],
            left_out=sorted(number - first for number in left_out if first <= number < self._taken),
            totals=dict(zip(PHASES, self._totals, strict=True)),
            num_steps=self._number,
            loader=self._loader.times,
            samples=self._sampler.series(),
        )

    def _take(self) -> None:
        """Move the steps that are known by now over here."""
        while self._phases.steps:
            step = self._phases.steps.popleft()
            self._steps.append(step)
            self._taken += 1
            self._totals = [total + seconds for total, seconds in zip(self._totals, step, strict=True)]
