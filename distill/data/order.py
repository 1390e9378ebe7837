"""The order in which the sequences of an epoch are fed: a pure function of seed, epoch and position.

Nothing of it is saved or passed on from step to step. A run that resumes anywhere, on any number of ranks, computes
the sequences of the positions that come next as it would have without the interruption.

Lengths: n positions, m sequences of a rank, B blocks, which are the files of sequences (`distill.data.shards`).
"""

import math
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np

from distill.data.sequence_store import SequenceStore, sequence_bytes, starts_of
from distill.runtime.seed import key, shuffled

RAMP = 32  # the first window of a run is this part of a whole one ...
FEWEST = 2  # ... or so many blocks: after a single one there are two, twice as many
GROWTH = 1.5  # of the windows after it: storage that gives twice what the run needs is ahead of them


class At(NamedTuple):
    """A point of a run."""

    epoch: int
    position: int  # in the epoch
    left: int  # sequences from here to the end of the run


class Order(Protocol):
    """Which sequence is at which position of an epoch."""

    def __len__(self) -> int:
        """Sequences of an epoch."""
        ...

    def numbers(self, epoch: int, positions: np.ndarray) -> np.ndarray:
        """The numbers [n] int64 of the sequences at these positions [n] int64 of an epoch."""
        ...

    def passes(self, epoch: int, positions: np.ndarray) -> np.ndarray | int:
        """How often each of these sequences, or of all, came before; its masks are drawn anew by that number."""
        ...

    def of_rank(self, numbers: np.ndarray, rank: int, size: int) -> np.ndarray:
        """Which sequences of a step, given by their numbers [n], a rank takes: indices [m] into them, ascending."""
        ...

    def upcoming(self, at: At, rank: int, size: int) -> np.ndarray:
        """A sequence number of each block that a rank reads from there on, in the order of need, [b] int64.

        Blocks are fetched ahead by it: a rank may need a few more.
        """
        ...

    @property
    def identity(self) -> Hashable:
        """What decides this order besides the seed and the number of sequences; None where nothing does."""
        ...


@dataclass(frozen=True)
class FullShuffle:
    """All sequences in a random order, another one in every epoch."""

    num_sequences: int
    seed: int
    starts: np.ndarray | None = None  # [B + 1] int64: the first sequence of each block, then the number of sequences

    def __len__(self) -> int:
        return self.num_sequences

    def numbers(self, epoch: int, positions: np.ndarray) -> np.ndarray:
        return shuffled(positions, self.num_sequences, key(self.seed, "order", epoch))

    def passes(self, epoch: int, positions: np.ndarray) -> int:
        return epoch

    def of_rank(self, numbers: np.ndarray, rank: int, size: int) -> np.ndarray:
        return np.arange(rank, len(numbers), size)

    def upcoming(self, at: At, rank: int, size: int) -> np.ndarray:
        """Every block; ranks begin at different ones, so that those of a node do not wait for each other."""
        blocks = np.zeros(0, np.int64) if self.starts is None else self.starts[:-1]
        return np.roll(blocks, -(rank * len(blocks) // size))

    @property
    def identity(self) -> None:
        return None


class Plan(NamedTuple):
    """The windows of an epoch. K windows."""

    blocks: np.ndarray  # [B] int64: the blocks in their order
    starts: np.ndarray  # [B + 1] int64: the position of the first sequence of each of them
    bounds: np.ndarray  # [K + 1] int64: which of them is the first of each window
    edges: np.ndarray  # [K + 1] int64: the position at which each window begins


@dataclass(frozen=True, eq=False)
class WindowedShuffle:
    """Blocks in a random order, cut into windows, and the sequences of each window in a random order.

    Only the blocks of a window have to be near, whatever the size of the corpus. A run begins with small windows, which
    grow while the following ones are fetched: it does not wait until a whole window is there.

    The sequences of a step are dealt to ranks by their numbers, so that a rank of N reads about an Nth of each window.
    """

    starts: np.ndarray  # [B + 1] int64: the first sequence of each block, then the number of sequences
    window: int  # blocks of a window
    seed: int
    _plans: dict[int, Plan] = field(default_factory=dict)  # by epoch: those in use

    def __len__(self) -> int:
        return int(self.starts[-1])

    def numbers(self, epoch: int, positions: np.ndarray) -> np.ndarray:
        plan = self.plan(epoch)
        windows = np.searchsorted(plan.edges, positions, side="right") - 1
        shuffled_to = np.empty(len(positions), np.int64)
        for window in np.unique(windows):
            begin, end = plan.edges[window], plan.edges[window + 1]
            inside = windows == window
            order = key(self.seed, "window", epoch, int(window))
            shuffled_to[inside] = begin + shuffled(positions[inside] - begin, int(end - begin), order)
        block_index = np.searchsorted(plan.starts, shuffled_to, side="right") - 1
        return self.starts[plan.blocks[block_index]] + shuffled_to - plan.starts[block_index]

    def passes(self, epoch: int, positions: np.ndarray) -> int:
        return epoch

    def of_rank(self, numbers: np.ndarray, rank: int, size: int) -> np.ndarray:
        by_number = np.argsort(numbers, kind="stable")
        return np.sort(np.array_split(by_number, size)[rank])

    def upcoming(self, at: At, rank: int, size: int) -> np.ndarray:
        """A sequence of each block of this window and of the next one, which may be the first of the next epoch."""
        plan = self.plan(at.epoch)
        window = int(np.searchsorted(plan.edges, at.position, side="right")) - 1
        parts = [self._part(plan, window, rank, size)]
        if at.position + at.left > plan.edges[window + 1]:
            following = (plan, window + 1) if window + 2 < len(plan.bounds) else (self.plan(at.epoch + 1), 0)
            parts.append(self._part(*following, rank, size))
        return self.starts[np.concatenate(parts)]

    def _part(self, plan: Plan, window: int, rank: int, size: int) -> np.ndarray:
        """The blocks of a window that a rank reads, ascending: its part by their numbers, and one more on each side."""
        blocks = np.sort(plan.blocks[plan.bounds[window] : plan.bounds[window + 1]])
        first, last = len(blocks) * rank // size, -(-len(blocks) * (rank + 1) // size)
        return blocks[max(0, first - 1) : last + 1]

    def plan(self, epoch: int) -> Plan:
        """The windows of an epoch; those of neighbouring epochs are kept."""
        if (plan := self._plans.get(epoch)) is None:
            for other in [other for other in list(self._plans) if abs(other - epoch) > 1]:
                self._plans.pop(other, None)  # another thread may have been quicker
            plan = self._plans[epoch] = self._make_plan(epoch)
        return plan

    def _make_plan(self, epoch: int) -> Plan:
        count = len(self.starts) - 1
        blocks = shuffled(np.arange(count), count, key(self.seed, "blocks", epoch))
        starts = np.concatenate([[0], np.cumsum(np.diff(self.starts)[blocks])])
        bounds = window_bounds(count, self.window, ramp=epoch == 0)
        return Plan(blocks, starts, bounds, starts[bounds])

    @property
    def identity(self) -> Hashable:
        """Blocks and windows: with others the same seed gives another order."""
        longest = int(np.diff(self.starts).max())
        return f"{len(self.starts) - 1} blocks of at most {longest} rows, {self.window} a window"


def window_bounds(blocks: int, window: int, ramp: bool) -> np.ndarray:
    """Which block is the first of each window, then `blocks`, [K + 1] int64.

    All are of nearly one size, of `window` blocks at most; with `ramp` they grow to it from a small part of it.
    """
    bounds, length = [0], first_window(window) if ramp else window
    while length < window and bounds[-1] + length < blocks:
        bounds.append(bounds[-1] + length)
        length = math.ceil(length * GROWTH)
    rest = blocks - bounds[-1]
    cuts = -(-rest // window)
    return np.array([*bounds, *(bounds[-1] + (number + 1) * rest // cuts for number in range(cuts))], np.int64)


def first_window(window: int) -> int:
    """Blocks of the first window of a run, of `window` in a whole one."""
    return min(window, max(FEWEST, window // RAMP))


def order_of(sequences: SequenceStore, shuffle_bytes: int, seed: int) -> Order:
    """A full shuffle where the sequences take at most `shuffle_bytes`, else one in windows of blocks of about so many.

    It depends on the sequences and their blocks, and not on where these lie.
    """
    starts, width = starts_of(sequences), sequence_bytes(sequences)
    if starts is None or len(sequences) * width <= shuffle_bytes:
        return FullShuffle(len(sequences), seed, starts)
    blocks = len(starts) - 1
    return WindowedShuffle(starts, max(1, shuffle_bytes * blocks // (len(sequences) * width)), seed)
