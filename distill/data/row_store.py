"""Rows of token ids by number: what training and evaluation read, wherever the rows lie.

N rows, S positions.
"""

from typing import Protocol

import numpy as np


class RowStore(Protocol):
    """Rows of one length, numbered from 0. A NumPy array of two dimensions, in memory or mapped, is one."""

    @property
    def shape(self) -> tuple[int, ...]:
        """(N, S)."""
        ...

    def __len__(self) -> int:
        """N."""
        ...

    def __getitem__(self, numbers: np.ndarray, /) -> np.ndarray:
        """The rows of these numbers [n] int64, in their order: [n, S]."""
        ...
