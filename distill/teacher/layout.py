"""What a teacher cache keeps of a position: its columns, their number formats and their bytes."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from distill.config.models import TeacherCacheConfig

SMALL_VOCABULARY = 1 << 16  # ids of more tokens do not fit into 16 bits


class Column(NamedTuple):
    """The form of a file: one row of `width` numbers for each position."""

    width: int
    dtype: np.dtype

    @property
    def stride(self) -> int:
        """Bytes of a position."""
        return self.width * self.dtype.itemsize


@dataclass(frozen=True)
class Layout:
    """The columns of a cache.

    Attributes:
        top_k: M, the largest entries that are kept exactly; 0: none.
        sampled: K, the tokens that are drawn from all others; 0: none, and all others share one entry.
        vocabulary: V.
    """

    top_k: int
    sampled: int
    vocabulary: int

    @property
    def columns(self) -> dict[str, Column]:
        """The files by name, in the order in which checksums are taken over them."""
        ids = np.dtype(np.uint16 if self.vocabulary <= SMALL_VOCABULARY else np.int32)
        half = np.dtype(np.float16)
        columns = {
            "ids": Column(self.top_k, ids),
            "log_probs": Column(self.top_k + 1 if self.top_k else 0, half),
            "draws": Column(self.sampled, ids),
            "neg_entropy": Column(1 if self.sampled else 0, half),
        }
        return {name: column for name, column in columns.items() if column.width}

    @property
    def position_bytes(self) -> int:
        """Bytes of a position in all columns."""
        return sum(column.stride for column in self.columns.values())

    @property
    def title(self) -> str:
        """The settings behind it, for messages."""
        settings = {"top_k": self.top_k, "sampled": self.sampled}
        return " with ".join(f"{name}={value}" for name, value in settings.items() if value)

    @property
    def largest(self) -> str:
        """The setting of a cache that makes it smaller soonest."""
        return "sampled" if self.sampled > 2 * self.top_k else "top_k"


def layout_of(settings: TeacherCacheConfig, vocabulary: int) -> Layout:
    """What these settings keep of a teacher with so many tokens."""
    return Layout(settings.top_k or 0, settings.sampled or 0, vocabulary)
