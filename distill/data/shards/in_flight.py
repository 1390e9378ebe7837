"""Bounds what blocks take of a process's memory between storage and the disk of the node."""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Condition

from distill.data.shards.fetch import PIECE
from distill.data.shards.index import Block, Layout

BYTES = 96 << 20  # of all blocks on their way: four of 16 MiB that are not compressed, or more smaller ones
AHEAD = 0.75  # fraction of it for blocks that are fetched ahead


class InFlight:
    """The bytes of the blocks that are on their way; a thread that would add too many waits for others."""

    def __init__(self, max_bytes: int = BYTES) -> None:
        self.max_bytes, self.taken = max_bytes, 0
        self._changed = Condition()

    @contextmanager
    def room_for(self, num_bytes: int, ahead: bool) -> Iterator[None]:
        """A context that begins when there is room for so many bytes; for more than all of it, when there is nothing.

        Args:
            ahead: fetched before they are needed, so that they leave room to blocks that a thread waits for.
        """
        limit = self.max_bytes * (AHEAD if ahead else 1)
        with self._changed:
            self._changed.wait_for(lambda: not self.taken or self.taken + num_bytes <= limit)
            self.taken += num_bytes
        try:
            yield
        finally:
            with self._changed:
                self.taken -= num_bytes
                self._changed.notify_all()


def bytes_in_flight(block: Block, layout: Layout) -> int:
    """The most that a block takes of memory: itself, and a piece of it twice in transit, or its plain sequences."""
    plain = 0 if layout.compression is None else block.sequences * layout.sequence_bytes
    return block.size + max(2 * min(block.size, PIECE), plain)
