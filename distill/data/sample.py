"""Some of many sequences: a choice that depends on its purpose and on the sequences alone, never on where they lie."""

import math
from fractions import Fraction

import numpy as np

from distill.data.sequence_store import SequenceStore, sequence_bytes, starts_of
from distill.runtime.seed import key, shuffled

FEWEST_BLOCKS = 16  # that the sequences are chosen from
SPREAD, DENSE = 4, 1.25  # times as many blocks as would do
LARGE = 4 << 30  # bytes from which some blocks are chosen first; not a setting, as the sequences would depend on it


class Chosen:
    """Some sequences of a store, renumbered from 0 in their old order."""

    def __init__(self, sequences: SequenceStore, numbers: np.ndarray) -> None:
        """numbers: [n] int64, ascending."""
        self.sequences, self.numbers = sequences, numbers
        self.dtype, self.shape = sequences.dtype, (len(numbers), sequences.shape[1])

    @property
    def starts(self) -> np.ndarray | None:
        """The first sequence of each block of which there are some, then n; None where the store has no blocks."""
        starts = starts_of(self.sequences)
        return None if starts is None else np.unique(np.searchsorted(self.numbers, starts))

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, numbers: np.ndarray, /) -> np.ndarray:
        return self.sequences[self.numbers[numbers]]

    def expect(self, numbers: np.ndarray) -> None:
        if (expect := getattr(self.sequences, "expect", None)) is not None:
            expect(self.numbers[numbers])


def sample_numbers(total: int, limit: int | None, purpose: str) -> np.ndarray | None:
    """The numbers of at most `limit` of the sequences, in order; None: all. The choice depends on `purpose` alone."""
    if limit is None or limit >= total:
        return None
    return np.sort(shuffled(np.arange(limit), total, key(0, purpose)))


def choose_sequences(
    sequences: SequenceStore, limit: int | None, purpose: str, large: int = LARGE, spread: float = SPREAD
) -> np.ndarray | None:
    """As `sample_numbers`; where they take more than `large` bytes, from some of their blocks, so that few are read.

    These are 16 blocks, or `spread` times as many as would do where that is more.
    """
    starts, total = starts_of(sequences), len(sequences)
    if limit is None or starts is None or limit >= total or total * sequence_bytes(sequences) <= large:
        return sample_numbers(total, limit, purpose)
    sizes = np.diff(starts)
    count = min(len(sizes), max(FEWEST_BLOCKS, math.ceil(Fraction(spread) * limit * len(sizes) / total)))
    blocks = np.sort(shuffled(np.arange(count), len(sizes), key(0, f"blocks of {purpose}")))
    ends = np.cumsum(sizes[blocks])
    chosen = np.sort(shuffled(np.arange(min(limit, ends[-1])), int(ends[-1]), key(0, purpose)))
    block = np.searchsorted(ends, chosen, side="right")
    numbers: np.ndarray = starts[blocks[block]] + chosen - (ends - sizes[blocks])[block]
    return numbers


def subsample(sequences: SequenceStore, limit: int | None, purpose: str, shuffle_bytes: int = 1 << 62) -> SequenceStore:
    """At most `limit` of the sequences, in their old order, in memory unless they take more than `shuffle_bytes`.

    Those that do are read in windows of whole blocks, of which little may be left out: a cache has room for so many.
    """
    fits = limit is None or limit * sequence_bytes(sequences) <= shuffle_bytes
    numbers = choose_sequences(sequences, limit, purpose, spread=SPREAD if fits else DENSE)
    if numbers is None:
        return sequences
    return sequences[numbers] if fits else Chosen(sequences, numbers)
