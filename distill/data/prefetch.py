"""Windows of batches prepared ahead of the loop by threads, whose number changes no result."""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from itertools import islice
from typing import TypeVar

from distill.runtime.errors import Interrupted
from distill.runtime.signals import in_force

WINDOWS_AHEAD = 4  # or one for each thread, where those are more
NAP = 0.25  # seconds between two looks, while the loop waits, whether the process is to stop

Window = TypeVar("Window")


def prefetch(prepare: Callable[[int], Window], steps: range, threads: int) -> Iterator[Window]:
    """The windows of the steps in their order, each prepared in one of the threads; without threads by the loop itself.

    After a signal to stop the process, a loop that would have to wait gets no further window: the step under
    way is the last one in any case, and storage that is out of order may keep a window back for minutes.
    """
    if not threads:
        yield from _in_loop(prepare, steps)
        return
    coming = iter(steps)
    pool = ThreadPoolExecutor(threads, thread_name_prefix="batches")
    try:
        ahead = deque(pool.submit(prepare, step) for step in islice(coming, max(WINDOWS_AHEAD, threads)))
        while ahead:
            if not _comes(ahead[0]):
                return
            try:
                window = ahead.popleft().result()
            except Interrupted:  # in the thread that prepared it, which does not act on signals
                return
            ahead.extend(pool.submit(prepare, step) for step in islice(coming, 1))
            yield window
            del window  # see `Batches.stream`
    finally:
        pool.shutdown(cancel_futures=True)


def _in_loop(prepare: Callable[[int], Window], steps: range) -> Iterator[Window]:
    for step in steps:
        try:
            window = prepare(step)
        except Interrupted:  # outside of the loop a signal raises here, as anywhere else
            if not in_force().is_deferred:
                raise
            return
        yield window
        del window


def _comes(future: Future[Window]) -> bool:
    """Waits for a window; False where the process is to stop before it is there."""
    signals = in_force()
    while not wait([future], NAP).done:
        if signals.stopping is not None:
            return False
    return True
