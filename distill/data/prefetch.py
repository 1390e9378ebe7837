"""Windows of batches prepared ahead of the loop by threads, of which there are more while storage is slow.

The loop gets windows in the order of their steps whatever the threads do, so their number changes no result.
"""

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from threading import Lock
from typing import Generic, TypeVar

from distill.runtime.errors import Interrupted
from distill.runtime.host import computed_seconds
from distill.runtime.signals import in_force

WINDOWS_AHEAD = 4  # or one for each thread, where those are more
MAX_THREADS = 16  # that an automatic choice goes up to
PERIOD = 4  # windows between two choices, or one for each thread, where those are more
WAITED = 0.05  # fraction of its time that the loop may wait for windows before threads are added
SPARE = 1.25  # times the threads that would do if every window took equally long
GAIN = 0.1  # fraction of the waiting that added threads have to save, or they are given up again
NAP = 0.25  # seconds between two looks, while the loop waits, whether the process is to stop

logger = logging.getLogger(__name__)
Window = TypeVar("Window")
Result = TypeVar("Result")


@dataclass
class Pace:
    """How long some windows took, in seconds: sums over all of them."""

    windows: int = 0
    loop: float = 0.0  # from one window taken to the next, the wait for it included
    waited: float = 0.0  # of that: until the window was there
    prepared: float = 0.0  # from the beginning to the end of a window's preparation, in its thread
    computed: float = 0.0  # of that: computing, or ready to compute while others use the cores

    def add(self, loop: float, waited: float, prepared: float, computed: float) -> None:
        self.windows += 1
        self.loop += loop
        self.waited += waited
        self.prepared += prepared
        self.computed += computed


def choose_threads(pace: Pace, threads: int, max_threads: int) -> int:
    """How many threads should prepare windows, after `threads` of them had this pace: as many, or more.

    Windows that take P seconds to prepare, and that the loop uses up in L seconds, need P / L threads, and a few more
    as some take longer than others. Where C of the P seconds are computing, about P / C threads keep Python busy, which
    computes in one of them at a time. Further ones would be in each other's way, so that preparation that computes all
    the time gets none.
    """
    if threads >= max_threads or pace.waited <= WAITED * pace.loop:
        return threads
    needed = math.ceil(SPARE * pace.prepared / max(pace.loop - pace.waited, 1e-9))
    useful = round(pace.prepared / max(pace.computed, 1e-9))
    return max(threads, min(max(needed, threads + 1), useful, max_threads))


class ThreadCount:
    """The number of threads that prepare windows. It grows while the loop waits for storage, if that helps.

    Attributes:
        threads: how many there are now.
        max_threads: how many there may be; as many as there are at first: their number is fixed.
    """

    def __init__(self, threads: int, max_threads: int) -> None:
        self.threads, self.max_threads = threads, max(threads, max_threads)
        self._pace = Pace()
        self._skip = 1  # coming windows that do not count; every loop waits for its first one
        self._before: tuple[int, Pace] | None = None  # what fewer threads did, until more have proved themselves

    def note(self, loop: float, waited: float, prepared: float, computed: float) -> None:
        """Take note of a window's seconds, named as in `Pace`; when enough windows are known, choose anew."""
        if self.threads == self.max_threads and self._before is None:
            return
        if self._skip:
            self._skip -= 1
            return
        self._pace.add(loop, waited, prepared, computed)
        if self._pace.windows >= max(PERIOD, self.threads):
            self._choose(self._pace)
            self._pace = Pace()

    def _choose(self, pace: Pace) -> None:
        if self._before is not None:
            fewer, before = self._before
            self._before = None
            if pace.waited / pace.windows > (1 - GAIN) * before.waited / before.windows:
                logger.info(f"batches wait as long with {self.threads} threads as with {fewer}: back to {fewer}")
                self.threads = self.max_threads = fewer
                return
        threads = choose_threads(pace, self.threads, self.max_threads)
        if threads > self.threads:
            logger.info(f"batches wait for storage: {threads} threads now prepare them, instead of {self.threads}")
            self._before = (self.threads, pace)
            self.threads = threads
            self._skip = threads + WINDOWS_AHEAD  # begun before, or all at once: neither is the pace of these threads


class Prefetch(Generic[Window]):
    """Calls `prepare` for each of the steps in threads, and gives its results in the order of the steps.

    At most one window for each thread, or `WINDOWS_AHEAD` where that is more, are in preparation or wait for the loop.

    After a signal to stop the process, a loop that would have to wait gets no further window: the step under
    way is the last one in any case, and storage that is out of order may keep a window back for minutes.
    """

    def __init__(self, prepare: Callable[[int], Window], steps: range, count: ThreadCount) -> None:
        self.prepare, self.steps, self.count = prepare, steps, count
        self._ahead: deque[Future[tuple[Window, float, float]]] = deque()
        self._lock = Lock()  # of what follows, which the loop and the threads change
        self._begun = 0  # steps that have been given to a thread
        self._running = 0
        self._closed = False

    def __iter__(self) -> Iterator[Window]:
        with ThreadPoolExecutor(self.count.max_threads, thread_name_prefix="batches") as pool:
            try:
                taken = time.perf_counter()
                for _ in self.steps:
                    self._fill(pool)
                    waiting = time.perf_counter()
                    if (coming := _result(self._ahead.popleft())) is None:
                        return
                    window, prepared, computed = coming
                    last, taken = taken, time.perf_counter()
                    self.count.note(taken - last, taken - waiting, prepared, computed)
                    self._fill(pool)
                    yield window
                    del window  # see `Batches.stream`
            finally:
                with self._lock:
                    self._closed = True

    def _fill(self, pool: ThreadPoolExecutor) -> None:
        """Give the next steps to threads that are free."""
        with self._lock:
            room = max(WINDOWS_AHEAD, self.count.threads) - len(self._ahead)
            free = self.count.threads - self._running
            left = 0 if self._closed else len(self.steps) - self._begun
            for _ in range(min(room, free, left)):
                self._ahead.append(pool.submit(self._work, pool, self.steps[self._begun]))
                self._begun += 1
                self._running += 1

    def _work(self, pool: ThreadPoolExecutor, step: int) -> tuple[Window, float, float]:
        """The window of a step, the seconds that it took, and in how many of them this thread computed."""
        try:
            began, computed = time.perf_counter(), computed_seconds()
            return self.prepare(step), time.perf_counter() - began, computed_seconds() - computed
        finally:
            with self._lock:
                self._running -= 1
            self._fill(pool)


def prepared_in_loop(prepare: Callable[[int], Window], steps: range) -> Iterator[Window]:
    """Windows without threads: each is made when the loop takes it."""
    for step in steps:
        try:
            window = prepare(step)
        except Interrupted:
            if not in_force().is_deferred:
                raise
            return
        yield window


def _result(coming: Future[Result]) -> Result | None:
    """What has been prepared, once it is there; None where the process is to stop before.

    Outside of the loop a signal raises here, as anywhere else.
    """
    signals = in_force()
    while not wait([coming], NAP).done:
        if signals.stopping is not None:
            return None
    try:
        return coming.result()
    except Interrupted:  # in the thread that prepared it, which does not act on signals
        return None
