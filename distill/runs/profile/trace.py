"""A few steps operation by operation, by torch.profiler, as a file that chrome://tracing and Perfetto show."""

import os
from pathlib import Path
from typing import Any

import torch

# Micro-batches of a trace: each adds a few thousand operations, and the file is to stay at a few megabytes.
MOST_MICRO_BATCHES = 32


class Trace:
    """Records the steps from `after` on; the phases of a step stand above its operations.

    Attributes:
        steps: the numbers of the recorded steps since the start of the run, which take longer by that.
    """

    def __init__(self, path: Path, after: int, steps: int, micro_batches: int, device: torch.device) -> None:
        """`path`: of the file, .json.gz; `micro_batches`: of a step."""
        self.path, self._device = path, device
        count = min(steps, max(1, MOST_MICRO_BATCHES // micro_batches))
        self.steps = range(after, after + count) if steps else range(0)
        self._profiler: Any = None
        self._phase: Any = None

    @property
    def on(self) -> bool:
        return self._profiler is not None

    def before_step(self, number: int) -> None:
        """The step of this number, from 0, is about to begin: start or end where it is time."""
        if self.steps and number == self.steps.start:
            self._start()
        elif self.on and number >= self.steps.stop:
            self.stop()

    def enter(self, phase: str) -> None:
        """From now on it is this phase."""
        self._leave()
        self._phase = torch.profiler.record_function(phase)
        self._phase.__enter__()

    def stop(self) -> None:
        """Write what has been recorded, if anything is."""
        if self._profiler is None:
            return
        self._leave()
        profiler, self._profiler = self._profiler, None
        profiler.stop()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(self.path))

    def _start(self) -> None:
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # it would write lines of its own between those of the run
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._profiler = torch.profiler.profile(activities=activities)
        self._profiler.start()

    def _leave(self) -> None:
        if self._phase is not None:
            self._phase.__exit__(None, None, None)
            self._phase = None
