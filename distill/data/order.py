"""The order in which the sequences of an epoch are fed: a pure function of seed, epoch and position.

Nothing of it is saved or passed on from step to step. A run that resumes anywhere, on any number of ranks, computes
the sequences of the positions that come next as it would have without the interruption.

Lengths: n positions, m sequences of a rank, B files of sequences (`distill.data.shards`), K windows.
"""

import math
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np

from distill.data.sequence_store import SequenceStore, sequence_bytes, starts_of
from distill.runtime.seed import key, shuffled

RAMP = 32  # the first window of a run is this fraction of a whole one ...
FEWEST = 2  # ... or so many files: after a single one there are two, twice as many
GROWTH = 1.5  # of the windows after it: storage that gives twice what the run needs is ahead of them


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

    def places(self, numbers: np.ndarray) -> np.ndarray | None:
        """What the sequences of a step [n] are sorted by, so that a rank reads few files; None: they are dealt out."""
        ...

    def upcoming(self, epoch: int, position: int, left: int, rank: int, size: int) -> np.ndarray:
        """The number of a sequence in each file that a rank reads from there on, in the order of need, [b] int64.

        Files are fetched ahead by it: a rank may need a few more.

        Args:
            left: sequences from there to the end of the run.
        """
        ...

    @property
    def identity(self) -> Hashable:
        """What decides this order besides the seed and the number of sequences; None where nothing does."""
        ...


def of_rank(order: Order, numbers: np.ndarray, rank: int, size: int) -> np.ndarray:
    """Which sequences of a step, given by their numbers [n], a rank takes: indices [m] into them, ascending."""
    places = order.places(numbers)
    if places is None:
        return np.arange(rank, len(numbers), size)
    return np.sort(np.array_split(np.lexsort((numbers, places)), size)[rank])


@dataclass(frozen=True)
class FullShuffle:
    """All sequences in a random order, another one in every epoch."""

    num_sequences: int
    seed: int
    starts: np.ndarray | None = None  # [B + 1] int64: the first sequence of each file, then the number of sequences

    def __len__(self) -> int:
        return self.num_sequences

    def numbers(self, epoch: int, positions: np.ndarray) -> np.ndarray:
        return shuffled(positions, self.num_sequences, key(self.seed, "order", epoch))

    def passes(self, epoch: int, positions: np.ndarray) -> int:
        return epoch

    def places(self, numbers: np.ndarray) -> None:
        return None

    def upcoming(self, epoch: int, position: int, left: int, rank: int, size: int) -> np.ndarray:
        """Every file; ranks begin at different ones, so that those of a node do not wait for each other."""
        files = np.zeros(0, np.int64) if self.starts is None else self.starts[:-1]
        return np.roll(files, -(rank * len(files) // size))

    @property
    def identity(self) -> None:
        return None


class Plan(NamedTuple):
    """The windows of an epoch."""

    files: np.ndarray  # [B] int64: the files in their order
    starts: np.ndarray  # [B + 1] int64: the position of the first sequence of each of them
    bounds: np.ndarray  # [K + 1] int64: which of them is the first of each window

    @property
    def edges(self) -> np.ndarray:
        """[K + 1] int64: the position at which each window begins."""
        return self.starts[self.bounds]

    def of_rank(self, window: int, rank: int, size: int) -> np.ndarray:
        """The files of a window that a rank reads, ascending: an equal part by number, and one more on each side."""
        files = np.sort(self.files[self.bounds[window] : self.bounds[window + 1]])
        first, last = len(files) * rank // size, -(-len(files) * (rank + 1) // size)
        return files[max(0, first - 1) : last + 1]


@dataclass(frozen=True, eq=False)
class WindowedShuffle:
    """Files in a random order, cut into windows, and the sequences of each window in a random order.

    Only the files of a window have to be near, whatever the size of the corpus. A run begins with small windows, which
    grow while the following ones are fetched: it does not wait until a whole window is there.

    The sequences of a step are dealt to ranks by their numbers, so that a rank of N reads about an Nth of each window.
    """

    starts: np.ndarray  # [B + 1] int64: the first sequence of each file, then the number of sequences
    window: int  # files of a window
    seed: int
    _plans: dict[int, Plan] = field(default_factory=dict)  # by epoch: those in use

    def __len__(self) -> int:
        return int(self.starts[-1])

    def numbers(self, epoch: int, positions: np.ndarray) -> np.ndarray:
        plan = self.plan(epoch)
        windows = np.searchsorted(plan.edges, positions, side="right") - 1
        shuffled_to = np.empty(len(positions), np.int64)
        for window in np.unique(windows):
            begin, end = plan.edges[window : window + 2]
            inside = windows == window
            order = key(self.seed, "window", epoch, int(window))
            shuffled_to[inside] = begin + shuffled(positions[inside] - begin, int(end - begin), order)
        file = np.searchsorted(plan.starts, shuffled_to, side="right") - 1
        return self.starts[plan.files[file]] + shuffled_to - plan.starts[file]

    def passes(self, epoch: int, positions: np.ndarray) -> int:
        return epoch

    def places(self, numbers: np.ndarray) -> np.ndarray:
        return numbers

    def upcoming(self, epoch: int, position: int, left: int, rank: int, size: int) -> np.ndarray:
        """A sequence in each file of this window and of the next one, which may be the first of the next epoch."""
        plan = self.plan(epoch)
        window = int(np.searchsorted(plan.edges, position, side="right")) - 1
        files = [plan.of_rank(window, rank, size)]
        if position + left > plan.edges[window + 1]:
            following, window = (plan, window + 1) if window + 2 < len(plan.bounds) else (self.plan(epoch + 1), 0)
            files.append(following.of_rank(window, rank, size))
        return self.starts[np.concatenate(files)]

    def plan(self, epoch: int) -> Plan:
        """The windows of an epoch; those of neighbouring epochs are kept."""
        if (plan := self._plans.get(epoch)) is None:
            for other in [other for other in list(self._plans) if abs(other - epoch) > 1]:
                self._plans.pop(other, None)  # another thread may have been quicker
            count = len(self.starts) - 1
            files = shuffled(np.arange(count), count, key(self.seed, "blocks", epoch))
            starts = np.concatenate([[0], np.cumsum(np.diff(self.starts)[files])])
            plan = self._plans[epoch] = Plan(files, starts, window_bounds(count, self.window, ramp=epoch == 0))
        return plan

    @property
    def identity(self) -> Hashable:
        """Files and windows: with others the same seed gives another order."""
        longest = int(np.diff(self.starts).max())
        return f"{len(self.starts) - 1} blocks of at most {longest} rows, {self.window} a window"


def window_bounds(files: int, window: int, ramp: bool) -> np.ndarray:
    """Which file is the first of each window, then `files`, [K + 1] int64.

    All are of nearly one size, of `window` files at most; with `ramp` they grow to it from a small part of it.
    """
    bounds, length = [0], min(window, max(FEWEST, window // RAMP)) if ramp else window
    while length < window and bounds[-1] + length < files:
        bounds.append(bounds[-1] + length)
        length = math.ceil(length * GROWTH)
    rest = files - bounds[-1]
    cuts = -(-rest // window)
    return np.array([*bounds, *(bounds[-1] + (number + 1) * rest // cuts for number in range(cuts))], np.int64)


def order_of(sequences: SequenceStore, shuffle_bytes: int, seed: int) -> Order:
    """A full shuffle where the sequences take at most `shuffle_bytes`, else one in windows of files of about so many.

    It depends on the sequences and their files, and not on where these lie.
    """
    starts, width = starts_of(sequences), sequence_bytes(sequences)
    if starts is None or len(sequences) * width <= shuffle_bytes:
        return FullShuffle(len(sequences), seed, starts)
    window = shuffle_bytes * (len(starts) - 1) // (len(sequences) * width)
    return WindowedShuffle(starts, max(1, window), seed)
