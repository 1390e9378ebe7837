"""Sequences of token ids by number: what training and evaluation read, wherever the sequences lie.

N sequences, S positions.
"""

from typing import Protocol

import numpy as np


class SequenceStore(Protocol):
    """Sequences of one length, numbered from 0. A NumPy array of two dimensions is one."""

    @property
    def shape(self) -> tuple[int, ...]:
        """(N, S)."""
        ...

    @property
    def dtype(self) -> np.dtype:
        """The element type of the ids."""
        ...

    def __len__(self) -> int:
        """N."""
        ...

    def __getitem__(self, numbers: np.ndarray, /) -> np.ndarray:
        """The sequences of these numbers [n] int64, in their order: [n, S]."""
        ...


def starts_of(sequences: SequenceStore) -> np.ndarray | None:
    """[B + 1] int64: the first sequence of each stored block, then N; None: they are one piece."""
    starts: np.ndarray | None = getattr(sequences, "starts", None)
    return starts


def expect(sequences: SequenceStore, numbers: np.ndarray) -> None:
    """Announce the sequences that will be read soon, [n] int64: a store may fetch their blocks, in this order."""
    if (prepare := getattr(sequences, "expect", None)) is not None:
        prepare(numbers)


def sequence_bytes(sequences: SequenceStore) -> int:
    """The bytes of a sequence."""
    dtype: np.dtype = sequences.dtype
    return int(sequences.shape[1]) * dtype.itemsize
