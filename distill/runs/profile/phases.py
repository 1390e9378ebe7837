"""The phases of a step: `with phase(FORWARD):` names one for torch.profiler, and for the recorder that times them."""

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

DATA, TEACHER, FORWARD, BACKWARD = "data", "teacher", "forward", "backward"
EXCHANGE, OPTIMIZER, CHECKPOINT, EVALUATION, OTHER = "exchange", "optimizer", "checkpoint", "evaluation", "other"
PHASES = (DATA, TEACHER, FORWARD, BACKWARD, EXCHANGE, OPTIMIZER, CHECKPOINT, EVALUATION, OTHER)
TITLES = {
    DATA: "waiting for data",
    TEACHER: "teacher",
    FORWARD: "forward",
    BACKWARD: "backward",
    EXCHANGE: "exchange between ranks",
    OPTIMIZER: "optimizer",
    CHECKPOINT: "checkpoints",
    EVALUATION: "evaluation",
    OTHER: "other",
}
COMPUTING = (TEACHER, FORWARD, BACKWARD)  # what a faster processor or a larger micro-batch makes shorter

Window = TypeVar("Window")


class Watcher:
    """What the loop reports to while it runs; this one times nothing."""

    @property
    def is_trial(self) -> bool:
        """Whether the run is for its profile alone, and leaves nothing else."""
        return False

    def enter(self, phase: str) -> str:
        """This phase begins; gives the one that it interrupts."""
        return OTHER

    def watch(self, prepare: Callable[[int], Window]) -> Callable[[int], Window]:
        """What prepares the window of a step, watched."""
        return prepare

    def end_step(self) -> bool:
        """A step has ended; whether the run is to end with it."""
        return False


_in_force = Watcher()


def in_force() -> Watcher:
    """What watches this process now."""
    return _in_force


@contextmanager
def watched_by(watcher: Watcher) -> Iterator[None]:
    """While it is open the phases of this process are reported to `watcher`."""
    global _in_force
    before, _in_force = _in_force, watcher
    try:
        yield
    finally:
        _in_force = before


@contextmanager
def phase(name: str) -> Iterator[None]:
    """A phase of the step; within another one it interrupts that. For the thread of the loop alone."""
    with torch.profiler.record_function(name):
        outer = _in_force.enter(name)
        try:
            yield
        finally:
            _in_force.enter(outer)


class Phases:
    """The seconds of each phase, step by step, on the clock of the host.

    A mark costs about as much as reading the clock. Anything before the first mark of a step counts as `other`.

    Attributes:
        steps: seconds of the phases of each step that is known by now, in the order of `PHASES`.
    """

    def __init__(self) -> None:
        self.steps: deque[list[float]] = deque()
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._phase, self._since = OTHER, time.perf_counter()

    def enter(self, phase: str) -> str:
        """From now on it is this phase; gives the one before."""
        now, before = time.perf_counter(), self._phase
        self._seconds[before] += now - self._since
        self._phase, self._since = phase, now
        return before

    def end_step(self) -> None:
        """The step ends, and the next one begins."""
        self.enter(OTHER)
        self.steps.append(list(self._seconds.values()))
        self._seconds = dict.fromkeys(PHASES, 0.0)

    def restart(self) -> None:
        """Between two steps: what has passed since the first one belongs to neither."""
        self._since = time.perf_counter()

    def finish(self) -> None:
        """No step follows: what is known late is known now."""


class CudaPhases(Phases):
    """The same on the clock of the GPU, which is behind the host's: the host only hands it work.

    A mark is an event in the GPU's stream. Between two events lies what the GPU computed for the phase, and what it
    waited for the host in it, so that the phases of a step add up to its time. They are read one step later, when
    the loop has waited for that step anyway: reading them makes nothing wait.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._marks: list[tuple[str, Any]] = [(OTHER, self._event())]
        self._unread: list[tuple[str, Any]] = []

    def enter(self, phase: str) -> str:
        before = self._marks[-1][0]
        self._marks.append((phase, self._event()))
        return before

    def end_step(self) -> None:
        self.enter(OTHER)
        self._read()
        self._unread, self._marks = self._marks, [self._marks[-1]]

    def restart(self) -> None:
        self._marks = [(OTHER, self._event())]

    def finish(self) -> None:
        torch.cuda.synchronize(self._device)
        self._read()

    def _read(self) -> None:
        """The seconds of the step before, whose events have all happened."""
        if not self._unread:
            return
        seconds = dict.fromkeys(PHASES, 0.0)
        for (phase, begin), (_, end) in zip(self._unread, self._unread[1:], strict=False):
            seconds[phase] += begin.elapsed_time(end) / 1000
        self.steps.append(list(seconds.values()))
        self._unread = []

    def _event(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event


def phases_on(device: torch.device) -> Phases:
    """What times the phases of a run on this device."""
    return CudaPhases(device) if device.type == "cuda" else Phases()
