"""Sequences by number from plain shards on a disk, through memory maps."""

from pathlib import Path

import numpy as np

from distill.data.sequence_store import bytes_of, gather
from distill.data.shards.index import ShardIndex
from distill.data.shards.store import ShardStore
from distill.runtime.errors import StorageFailed


class MappedShards(ShardStore):
    """The sequences of shards that are not compressed. Each file is mapped when a sequence of it is first read."""

    def __init__(self, folder: Path, index: ShardIndex) -> None:
        super().__init__(index)
        self.folder = folder
        blocks = np.searchsorted(index.shard, np.arange(index.num_shards + 1))
        self._first = index.first[blocks]  # [K + 1] the first sequence of each shard
        self._maps: dict[int, np.ndarray] = {}
        self._bytes: dict[int, memoryview] = {}  # of the same files

    def __getitem__(self, numbers: np.ndarray, /) -> np.ndarray:
        numbers = np.asarray(numbers)
        if self.index.num_shards == 1:
            return self.map(0)[numbers]
        shards = np.searchsorted(self._first, numbers, side="right") - 1
        within = numbers - self._first[shards]
        try:
            return gather(self._bytes, shards, within, self)
        except KeyError:
            for shard in np.unique(shards).tolist():
                self.map(shard)
            return gather(self._bytes, shards, within, self)

    def map(self, shard: int) -> np.ndarray:
        """All sequences of a shard. Raises StorageFailed where its file has not the size that the index gives."""
        if shard not in self._maps:
            self._maps[shard] = map_shard(self.folder, self.index, shard).view(np.ndarray)
            self._bytes[shard] = bytes_of(self._maps[shard])
        return self._maps[shard]


def map_shard(folder: Path, index: ShardIndex, shard: int) -> np.memmap:
    """The sequences of a shard that is not compressed: [N, S].

    Raises:
        StorageFailed: its file is missing, or has another size.
    """
    begin, end = np.searchsorted(index.shard, [shard, shard + 1])
    shape = (int(index.first[end] - index.first[begin]), index.layout.sequence_length)
    path = folder / index.layout.shard_name(shard)
    expected = shape[0] * index.layout.sequence_bytes
    size = path.stat().st_size if path.exists() else None
    if size != expected:
        problem = "is missing" if size is None else f"has {size:,} bytes instead of {expected:,}"
        raise StorageFailed(f"{path} {problem}: restore it, or delete {folder} to have it made anew")
    return np.memmap(path, index.layout.dtype, "r", shape=shape)
