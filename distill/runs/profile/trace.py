"""A few steps operation by operation, by torch.profiler: a trace for chrome://tracing or Perfetto, and a table."""

import os
from pathlib import Path
from typing import Any

import torch

# Micro-batches of a trace: each adds a few thousand operations, and the file is to stay at a few megabytes.
MOST_MICRO_BATCHES = 32
MAX_OPERATIONS = 30  # in the table, those that take longest


class Trace:
    """Records the steps from `after` on; the phases of a step stand above its operations.

    Attributes:
        steps: the numbers of the recorded steps since the start of the run, which take longer by that.
    """

    def __init__(self, path: Path, after: int, steps: int, micro_batches: int, device: torch.device) -> None:
        """`path`: of the trace, NAME.json.gz; `micro_batches`: of a step."""
        self.path, self._device = path, device
        count = min(steps, max(1, MOST_MICRO_BATCHES // micro_batches))
        self.steps = range(after, after + count) if steps else range(0)
        self._profiler: Any = None

    @property
    def on(self) -> bool:
        return self._profiler is not None

    def before_step(self, number: int) -> None:
        """The step of this number, from 0, is about to begin: start or end where it is time."""
        if self.steps and number == self.steps.start:
            self._start()
        elif self.on and number >= self.steps.stop:
            self.stop()

    def stop(self) -> None:
        """Write what has been recorded, if anything is."""
        if self._profiler is None:
            return
        profiler, self._profiler = self._profiler, None
        profiler.stop()
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
        self._profiler = torch.profiler.profile(activities=activities)
        self._profiler.start()
