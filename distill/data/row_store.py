"""Rows of token ids by number: what training and evaluation read, wherever the rows lie.

N rows, S positions.
"""

from collections.abc import Mapping
from typing import Protocol

import numpy as np


class RowStore(Protocol):
    """Rows of one length, numbered from 0. A NumPy array of two dimensions, in memory or mapped, is one."""

    @property
    def shape(self) -> tuple[int, ...]:
        """(N, S)."""
        ...

    @property
    def dtype(self) -> np.dtype:
        """Of the ids."""
        ...

    def __len__(self) -> int:
        """N."""
        ...

    def __getitem__(self, numbers: np.ndarray, /) -> np.ndarray:
        """The rows of these numbers [n] int64, in their order: [n, S]."""
        ...


def gather(pieces: Mapping[int, memoryview], piece: np.ndarray, within: np.ndarray, like: RowStore) -> np.ndarray:
    """Rows from several pieces of memory: of each row, [n], its piece and its number in that; [n, S].

    NumPy would take ten times as long to pick single rows from many arrays.

    Raises:
        KeyError: a piece is not there.
    """
    width = row_bytes(like)
    starts = zip(piece.tolist(), (within * width).tolist(), strict=True)
    data = bytearray().join([pieces[each][start : start + width] for each, start in starts])
    return np.frombuffer(data, like.dtype).reshape(len(piece), like.shape[1])


def starts_of(rows: RowStore) -> np.ndarray | None:
    """[B + 1] int64: the first row of each of the blocks in which rows are stored, then N; None: they are one piece."""
    starts: np.ndarray | None = getattr(rows, "starts", None)
    return starts


def expect(rows: RowStore, numbers: np.ndarray) -> None:
    """Tell a store which rows will be read soon, [n] int64: it may fetch the blocks that hold them, in this order."""
    if (prepare := getattr(rows, "expect", None)) is not None:
        prepare(numbers)


def bytes_of(rows: np.ndarray) -> memoryview:
    """Those of rows that lie one after the other in memory."""
    return rows.reshape(-1).view(np.uint8).data


def row_bytes(rows: RowStore) -> int:
    """Of a row that is not compressed."""
    dtype: np.dtype = rows.dtype
    return int(rows.shape[1]) * dtype.itemsize
