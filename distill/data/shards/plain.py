"""Sequences by number from plain shards on a disk."""

from pathlib import Path

import numpy as np

from distill.data.sequence_store import gather
from distill.data.shards.index import ShardIndex
from distill.data.shards.store import ShardStore
from distill.runtime.errors import StorageFailed
from distill.runtime.files import FileInUse


class PlainShards(ShardStore):
    """The sequences of shards that are not compressed. A file is opened when a sequence of it is first read."""

    def __init__(self, folder: Path, index: ShardIndex) -> None:
        super().__init__(index)
        self.folder = folder
        blocks = np.searchsorted(index.shard, np.arange(index.num_shards + 1))
        self._first = index.first[blocks]  # [K + 1] the first sequence of each shard
        self._files = dict[int, FileInUse]()

    def __getitem__(self, numbers: np.ndarray, /) -> np.ndarray:
        """Raises StorageFailed where a file is missing, has another size, or is changed since it was opened."""
        numbers = np.asarray(numbers)
        shards = np.searchsorted(self._first, numbers, side="right") - 1
        within = numbers - self._first[shards]
        try:
            return gather(self._files, shards, within, self)
        except KeyError:
            for shard in np.unique(shards).tolist():
                self._open(shard)
            return gather(self._files, shards, within, self)

    def _open(self, shard: int) -> None:
        if shard in self._files:
            return
        layout = self.index.layout
        path = self.folder / layout.shard_name(shard)
        expected = int(self._first[shard + 1] - self._first[shard]) * layout.sequence_bytes
        # Storage that fails, and no bad input: a moment ago the check of its folder has seen the file, of this size.
        size = path.stat().st_size if path.exists() else None
        if size != expected:
            problem = "is missing" if size is None else f"has {size:,} bytes instead of {expected:,}"
            raise StorageFailed(f"{path} {problem}: restore it, or delete {self.folder} to have it made anew")
        self._files[shard] = FileInUse(path)
