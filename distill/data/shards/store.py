"""What all stores of the sequences of shards have in common: lengths and blocks, from their index."""

import resource

import numpy as np

from distill.data.shards.index import ShardIndex


class ShardStore:
    """Sequences of shards by number. N sequences of S positions in B blocks."""

    def __init__(self, index: ShardIndex) -> None:
        # A store may keep a file of each shard, or of each block, open; a shell gives a process 1,024.
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        self.index = index
        self.dtype = np.dtype(index.layout.dtype)
        self.shape = (index.num_sequences, index.layout.sequence_length)

    @property
    def starts(self) -> np.ndarray:
        """[B + 1] int64: the first sequence of each block, then N."""
        return self.index.first

    def __len__(self) -> int:
        """N."""
        return self.shape[0]
