"""Names the ranks that the others wait for: after 30 seconds, and then once a minute."""

import json
import os
import socket
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, TextIO

from distill.runtime.progress import say

if TYPE_CHECKING:
    import torch.distributed as dist

FIRST, AGAIN = 30.0, 60.0  # seconds of waiting until ranks are named, and from then on
SIGN_OF_LIFE = 5.0  # seconds between two of them
SILENT = 4 * SIGN_OF_LIFE  # seconds without any
READERS = 16  # lowest ranks, which look at the signs of all: enough for one to be there, and few for the store

terminal: TextIO | None = None  # of a rank whose stderr is a log file: where the run's own stderr goes


class RollCall:
    """Each rank's thread writes into a store how many exchanges the rank has entered, and reads that of the others.

    A rank is named while this one waits for it in an exchange that it has not entered; in a barrier, where a rank may
    be at work for hours, only when its thread gives no sign of life either. The lowest rank that waits says so.
    """

    def __init__(self, store: "dist.Store", rank: int, size: int) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._entered = 0
        self._waiting: tuple[float, bool, int] | None = None  # since when, whether in a barrier, and in which exchange
        self._named_at = -AGAIN
        self._beats = 0
        self._last: dict[int, tuple[object, float]] = {}  # of each rank: what it wrote, and when that was new here
        self._where = f"{socket.gethostname()}, process {os.getpid()}"
        self._stop = threading.Event()
        threading.Thread(target=self._run, name="roll call", daemon=True).start()

    def enter(self, barrier: bool) -> None:
        """This rank begins to wait for the others; ranks do so in the same order."""
        self._entered += 1
        self._waiting = (time.monotonic(), barrier, self._entered)

    def leave(self) -> None:
        """It has been answered."""
        self._waiting = None

    def close(self) -> None:
        """End the thread, before the store is gone."""
        self._stop.set()

    def _run(self) -> None:
        try:
            while not self._stop.wait(SIGN_OF_LIFE):
                self._beat()
        except RuntimeError:  # the store is gone, and the launcher with it: the exchange will say so
            return

    def _beat(self) -> None:
        self._beats += 1
        waiting, now = self._waiting, time.monotonic()
        sign = [self._beats, self._entered, waiting is not None, self._where]
        self._store.set(f"{self._rank}", json.dumps(sign))
        # Others are looked at only once it takes long, early enough to see for how long they give no sign.
        if waiting is None or now - waiting[0] < FIRST - SILENT - SIGN_OF_LIFE or self._rank >= READERS:
            self._last.clear()
            return
        signs: dict[int, list[Any]] = {}
        for rank in range(self._size):
            if self._store.check([f"{rank}"]):
                signs[rank] = json.loads(self._store.get(f"{rank}"))
            if rank not in self._last or self._last[rank][0] != signs.get(rank):
                self._last[rank] = (signs.get(rank), now)
        if now - waiting[0] < FIRST or now - self._named_at < AGAIN:
            return
        missing = {
            rank: now - self._last[rank][1]
            for rank in range(self._size)
            if (rank not in signs or signs[rank][1] < waiting[2])
            and (not waiting[1] or now - self._last[rank][1] > SILENT)
        }
        if missing and self._rank == min(set(range(self._size)) - missing.keys()):
            self._named_at = now
            self._say(missing, signs, now - waiting[0])

    def _say(self, missing: dict[int, float], signs: dict[int, list[Any]], waited: float) -> None:
        for rank, silent in missing.items():
            where = f" ({signs[rank][3]})" if rank in signs else ""
            life = f", and has given no sign of life for {silent:.0f} s" if silent > SILENT else ", but is alive"
            line = f"rank {rank}{where} has not come to an exchange for {waited:.0f} s{life}"
            for stream in filter(None, {sys.stderr, terminal}):
                say(stream, f"{line}\n")
