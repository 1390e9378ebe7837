"""Files that a run reads here and there, mapped into memory: the last ones in use."""

import os
from functools import lru_cache
from mmap import ACCESS_READ, mmap

import numpy as np

MOST = (
    128  # files that are mapped at once, each of which is an open file: twice what `data.shuffle_bytes` has by default
)

State = tuple[int, int, int]  # of a file: size, time of change, inode


def state_of(path: str | int) -> State:
    """The state of a file, or of an open one by its descriptor."""
    status = os.stat(path)
    return status.st_size, status.st_mtime_ns, status.st_ino & (1 << 63) - 1  # some file systems take all 64 bits


def read_rows(path: str, state: State | None, row: np.dtype, indices: np.ndarray, start: int = 0) -> np.ndarray | None:
    """The rows of a file with these indices [n]; None where it is gone, or no longer in this state.

    Its state is looked at before, as a file that was cut would end the process, and after, as one may be written over.

    Args:
        row: what each of them is.
        start: bytes in front of the first one.
    """
    try:
        if state is None or state_of(path) != state:
            return None
        rows: np.ndarray = mapped(path, row, start, state)[indices]
        return rows if state_of(path) == state else None
    except FileNotFoundError:
        return None


@lru_cache(maxsize=MOST)
def mapped(path: str, row: np.dtype, start: int = 0, state: State | None = None) -> np.ndarray:
    """All rows of a file, which is in this state."""
    with open(path, "rb", buffering=0) as file:
        content = mmap(file.fileno(), 0, access=ACCESS_READ)
    return np.ndarray((len(content) - start) // row.itemsize, row, content, start)


def forget_maps() -> None:
    """Lets go of all files: those that were removed take room on the disk until then."""
    mapped.cache_clear()
