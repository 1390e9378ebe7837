"""What the threads that prepare batches spend on it: computing, or waiting for storage."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from distill.runtime.host import computed_seconds

Window = TypeVar("Window")


@dataclass
class LoaderTimes:
    """The preparation of windows, in seconds: sums over all of them.

    Attributes:
        prepared: from the beginning of a window to its end.
        computed: of that computing, or ready to compute while others use the cores.
        most_at_once: windows that were in preparation together, which is the number of threads where these are busy.
        in_loop: whether the loop itself prepares its windows, for want of threads.
    """

    windows: int = 0
    prepared: float = 0.0
    computed: float = 0.0
    most_at_once: int = 0
    in_loop: bool = False

    def begin(self, running: int) -> None:
        """A window begins, with which so many are in preparation."""
        self.most_at_once = max(self.most_at_once, running)

    def end(self, prepared: float, computed: float) -> None:
        """A window ends; called in the thread that has prepared it."""
        self.windows += 1
        self.prepared += prepared
        self.computed += computed
        self.in_loop = threading.current_thread() is threading.main_thread()


class LoaderClock:
    """Times what prepares windows, in whichever threads that happens."""

    def __init__(self) -> None:
        self.times = LoaderTimes()
        self._lock, self._running = threading.Lock(), 0

    def watch(self, prepare: Callable[[int], Window]) -> Callable[[int], Window]:
        """Wrap a function so that its calls are timed."""

        def timed(step: int) -> Window:
            with self._lock:
                self._running += 1
                self.times.begin(self._running)
            began, computed = time.perf_counter(), computed_seconds()
            try:
                return prepare(step)
            finally:
                self._add(time.perf_counter() - began, computed_seconds() - computed)

        return timed

    def _add(self, prepared: float, computed: float) -> None:
        with self._lock:
            self._running -= 1
            self.times.end(prepared, computed)
