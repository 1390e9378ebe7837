"""Which sequences lie where: the index of the shards of one part of a text.

A shard is a file of sequences. It consists of blocks, each of which can be read, verified and decompressed by itself,
so that a reader fetches the bytes of a block from an object store and not a whole shard.

Lengths: K shards, B blocks. Sequences are numbered through all shards.
"""

import io
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

DIGEST_BYTES = 32  # of sha256


class Block(NamedTuple):
    """Consecutive sequences of one shard."""

    shard: int
    first: int  # number of its first sequence, through all shards
    sequences: int
    offset: int  # where its bytes begin in the shard's file
    size: int  # stored bytes, compressed where the shards are
    digest: bytes  # sha256 of the stored bytes


@dataclass(frozen=True)
class Layout:
    """What all shards of a part have in common."""

    part: str  # train or heldout
    dtype: str  # of the ids: uint16 or uint32
    sequence_length: int
    compression: str | None = None  # null or zstd; each block is compressed by itself

    def shard_name(self, number: int) -> str:
        """The file of a shard, beside the index."""
        return f"{self.part}-{number:05d}.rows" + (".zst" if self.compression else "")

    @property
    def sequence_bytes(self) -> int:
        """The bytes of a sequence that is not compressed."""
        return self.sequence_length * np.dtype(self.dtype).itemsize


class ShardIndex:
    """The blocks of all shards in their order, in arrays: 10 TB of sequences in blocks of 16 MiB take 40 MB.

    Attributes:
        shard, sequences, offset, size: [B], as in `Block`.
        digests: [B, 32] uint8.
    """

    def __init__(
        self, layout: Layout, shard: np.ndarray, sequences: np.ndarray, offset: np.ndarray, size: np.ndarray,
        digests: np.ndarray,
    ) -> None:  # fmt: skip
        self.layout = layout
        self.shard, self.sequences, self.offset, self.size, self.digests = shard, sequences, offset, size, digests

    @classmethod
    def of_shards(cls, layout: Layout, shards: Iterable[Sequence[Block]]) -> "ShardIndex":
        """The index of shards, each given as its blocks in their order (their `shard` and `first` are counted anew)."""
        blocks = [(number, block) for number, shard in enumerate(shards) for block in shard]
        digests = np.frombuffer(b"".join(block.digest for _, block in blocks), np.uint8)
        return cls(
            layout,
            np.array([number for number, _ in blocks], np.int32),
            np.array([block.sequences for _, block in blocks], np.int32),
            np.array([block.offset for _, block in blocks], np.int64),
            np.array([block.size for _, block in blocks], np.int32),
            digests.reshape(-1, DIGEST_BYTES),
        )

    @cached_property
    def first(self) -> np.ndarray:
        """[B + 1] int64: the number of each block's first sequence, then of all sequences."""
        return np.concatenate([[0], np.cumsum(self.sequences, dtype=np.int64)])

    @property
    def num_sequences(self) -> int:
        return int(self.first[-1])

    @property
    def num_shards(self) -> int:
        return int(self.shard[-1]) + 1 if len(self.shard) else 0

    def __len__(self) -> int:
        """B."""
        return len(self.sequences)

    def block(self, number: int) -> Block:
        return Block(
            int(self.shard[number]), int(self.first[number]), int(self.sequences[number]), int(self.offset[number]),
            int(self.size[number]), self.digests[number].tobytes(),
        )  # fmt: skip

    def block_of(self, numbers: np.ndarray) -> np.ndarray:
        """The block of each sequence number, [n]."""
        return np.searchsorted(self.first, numbers, side="right") - 1

    def as_bytes(self) -> bytes:
        """What is stored as the file of the index."""
        file = io.BytesIO()
        layout = np.frombuffer(json.dumps(vars(self.layout)).encode(), np.uint8)
        np.savez(
            file, layout=layout, shard=self.shard, rows=self.sequences, offset=self.offset, size=self.size,
            digests=self.digests,
        )  # fmt: skip
        return file.getvalue()

    @classmethod
    def from_bytes(cls, data: bytes) -> "ShardIndex":
        """Raises ValueError where these are not the bytes of an index."""
        try:
            with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
                layout = Layout(**json.loads(arrays["layout"].tobytes()))
                return cls(layout, *(arrays[name] for name in ("shard", "rows", "offset", "size", "digests")))
        except Exception as error:  # of the reader of ZIP files, of that of arrays, or of memory that is not there
            raise ValueError("not an index of shards") from error
