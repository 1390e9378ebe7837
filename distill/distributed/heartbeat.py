"""Meetings of all ranks that may last for hours, at which a rank that is no longer alive is noticed and named."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import torch.distributed as dist

from distill.runtime.errors import RankLost

POLL = 0.05  # seconds between two looks at who is there
EVERY = 5.0  # seconds between two beats, where the time after which a rank is lost allows


class Heartbeat:
    """Some ranks prepare data for hours while the others wait, so how long a wait lasts shows nothing.

    Each rank therefore counts in the store that all share, in a thread, whatever else it computes. A rank that waits
    looks whether the counts of those that are missing still grow.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: float) -> None:
        """`timeout`: seconds without a beat after which a rank is lost."""
        self._store, self._rank, self._size, self._timeout = store, rank, size, timeout
        self._every = min(EVERY, timeout / 4)
        self._ended = threading.Event()
        # A call of the store hangs, and no signal ends it, where the rank that holds the store is stopped.
        self._calls = ThreadPoolExecutor(1, thread_name_prefix="store")
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self._thread.start()

    def meet(self, name: str) -> None:
        """Wait until all ranks have come to the meeting of this name, which has its name alone.

        Raises:
            RankLost: one of those that are missing, or the rank that holds the store, is not alive.
        """
        self._add(f"{name}/{self._rank}", 1)
        self._add(name, 1)
        beats: dict[int, tuple[int, float]] = {}  # of the ranks that are missing: their count, and when it was new
        looked = time.monotonic()
        while self._add(name, 0) < self._size:
            if time.monotonic() - looked > self._every:
                looked = time.monotonic()
                self._look_for_missing(name, beats)
            time.sleep(POLL)

    def leave(self) -> None:
        """Beat no more. Rank 0, which may hold the store, stays until no other rank needs it."""
        self._ended.set()
        self._thread.join()
        self._add("left", 1)
        until = time.monotonic() + self._timeout
        while self._rank == 0 and self._add("left", 0) < self._size and time.monotonic() < until:
            time.sleep(POLL)
        self._calls.shutdown()

    def _look_for_missing(self, name: str, beats: dict[int, tuple[int, float]]) -> None:
        for rank in range(self._size):
            if self._add(f"{name}/{rank}", 0):
                continue
            now, count = time.monotonic(), self._add(f"beat/{rank}", 0)
            if beats.get(rank, (-1, 0.0))[0] != count:
                beats[rank] = count, now
            elif now - beats[rank][1] > self._timeout:
                raise RankLost(
                    f"rank {rank} has not answered for {self._timeout:g} s (backend.timeout): its process is stopped "
                    "or its host is gone"
                )

    def _beat(self) -> None:
        while not self._ended.wait(self._every):
            try:
                self._store.add(f"beat/{self._rank}", 1)
            except RuntimeError:  # the store is gone, which the next meeting reports
                return

    def _add(self, name: str, amount: int) -> int:
        """Add to a count of the store; gives the new count."""
        try:
            return self._calls.submit(self._store.add, name, amount).result(self._timeout)
        except TimeoutError as error:
            raise RankLost(
                f"the store of the ranks, which rank 0 or its launcher holds, has not answered for {self._timeout:g} s "
                "(backend.timeout)"
            ) from error
