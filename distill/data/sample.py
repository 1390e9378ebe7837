"""Some of many rows: a choice that depends on its purpose and on the rows alone, never on where they lie."""

import numpy as np

from distill.data.row_store import RowStore, row_bytes, starts_of
from distill.runtime.seed import key, shuffled

FEWEST_BLOCKS = 64  # that the rows are chosen from
LARGE = 4 << 30  # bytes of rows from which some blocks are chosen first; not a setting, as the rows would depend on it


class Chosen:
    """Some rows of a store, renumbered from 0 in their old order."""

    def __init__(self, rows: RowStore, numbers: np.ndarray) -> None:
        """numbers: [n] int64, ascending."""
        self.rows, self.numbers = rows, numbers
        self.dtype, self.shape = rows.dtype, (len(numbers), rows.shape[1])

    @property
    def starts(self) -> np.ndarray | None:
        """The first row of each block of which there are some, then n; None where the store has no blocks."""
        starts = starts_of(self.rows)
        return None if starts is None else np.unique(np.searchsorted(self.numbers, starts))

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, numbers: np.ndarray, /) -> np.ndarray:
        return self.rows[self.numbers[numbers]]

    def expect(self, numbers: np.ndarray) -> None:
        if (expect := getattr(self.rows, "expect", None)) is not None:
            expect(self.numbers[numbers])


def sample_rows(num_rows: int, most: int | None, purpose: str) -> np.ndarray | None:
    """The numbers of at most `most` of the rows, in order; None: all. The choice depends on `purpose` alone."""
    if most is None or most >= num_rows:
        return None
    return np.sort(shuffled(np.arange(most), num_rows, key(0, purpose)))


def choose_rows(rows: RowStore, most: int | None, purpose: str, large: int = LARGE) -> np.ndarray | None:
    """As `sample_rows`; of rows that take more than `large` bytes, from some of their blocks, so that few are read.

    These are 64 blocks, or four times as many as would do where that is more.
    """
    starts = starts_of(rows)
    if most is None or starts is None or most >= len(rows) or len(rows) * row_bytes(rows) <= large:
        return sample_rows(len(rows), most, purpose)
    sizes = np.diff(starts)
    count = min(len(sizes), max(FEWEST_BLOCKS, -(-4 * most * len(sizes) // len(rows))))
    blocks = np.sort(shuffled(np.arange(count), len(sizes), key(0, f"blocks of {purpose}")))
    ends = np.cumsum(sizes[blocks])
    chosen = np.sort(shuffled(np.arange(min(most, ends[-1])), int(ends[-1]), key(0, purpose)))
    block = np.searchsorted(ends, chosen, side="right")
    numbers: np.ndarray = starts[blocks[block]] + chosen - (ends - sizes[blocks])[block]
    return numbers


def subsample_rows(rows: RowStore, most: int | None, purpose: str, shuffle_bytes: int = 1 << 62) -> RowStore:
    """At most `most` of the rows, in their old order, in memory unless they take more than `shuffle_bytes`."""
    numbers = choose_rows(rows, most, purpose)
    if numbers is None:
        return rows
    return rows[numbers] if len(numbers) * row_bytes(rows) <= shuffle_bytes else Chosen(rows, numbers)
