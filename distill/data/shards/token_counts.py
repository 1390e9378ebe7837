"""How often each token occurs in the sequences: counted by group, and folded as groups are finished.

A group's counts are a file for each part. Of 10,000 groups these would be gigabytes until the end of a preparation, so
that a host that sees `FOLD` consecutive groups published sums them up into one file and removes the others. Several
hosts that do so at the same time write the same sums.

V = length of the tokenizer, P parts.
"""

from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import suppress

import numpy as np

from distill.data.shards.destination import WORK, Destination, array_bytes
from distill.data.shards.records import PARTS

FOLD = 64  # groups
THREADS = 16  # that read or remove files


def write_counts(folder: Destination, number: int, part: str, counts: np.ndarray) -> None:
    """Publish the counts [V] int64 of a part of a group."""
    folder.write(_counts_name(number, part), array_bytes(counts))


def fold_of(number: int, num_groups: int) -> int | None:
    """The fold that a group belongs to, both numbered from 0; None: it is one of the last ones, fewer than `FOLD`."""
    fold = number // FOLD
    return fold if fold < num_groups // FOLD else None


def groups_of(fold: int) -> range:
    """The numbers of the groups of a fold."""
    return range(fold * FOLD, (fold + 1) * FOLD)


def fold_counts(folder: Destination, fold: int) -> None:
    """Put the counts of groups that are all published into one file.

    Raises:
        FileNotFoundError: another host has finished the preparation, and removed all of these files.
    """
    with ThreadPoolExecutor(THREADS) as pool:
        if not folder.exists(_folded_name(fold)):
            folder.write(_folded_name(fold), array_bytes(_of_fold(pool, folder, fold)))
        names = [_counts_name(number, part) for number in groups_of(fold) for part in PARTS]
        list(pool.map(folder.remove, names))


def total_counts(folder: Destination, num_groups: int) -> dict[str, np.ndarray]:
    """The counts [V] int64 of each part in all groups, folded or not. Raises FileNotFoundError as `fold_counts`."""
    with ThreadPoolExecutor(THREADS) as pool:
        folds = [_of_fold(pool, folder, fold) for fold in range(num_groups // FOLD)]
        rest = range(num_groups // FOLD * FOLD, num_groups)
        counts = sum([*folds, *([_of_groups(pool, folder, rest)] if rest else [])])
    return dict(zip(PARTS, np.asarray(counts), strict=True))


def _of_fold(pool: Executor, folder: Destination, fold: int) -> np.ndarray:
    """[P, V], from the file of the fold or those of its groups, which another host may be turning into it just now."""
    for _ in range(2):
        with suppress(FileNotFoundError):
            return folder.read_array(_folded_name(fold))
        with suppress(FileNotFoundError):
            return _of_groups(pool, folder, groups_of(fold))
    return folder.read_array(_folded_name(fold))


def _of_groups(pool: Executor, folder: Destination, numbers: range) -> np.ndarray:
    """[P, V], summed up with `THREADS` files in memory at a time."""
    return np.stack([sum(_read(pool, folder, numbers, part)) for part in PARTS])


def _read(pool: Executor, folder: Destination, numbers: range, part: str) -> Iterator[np.ndarray]:
    for begin in range(0, len(numbers), THREADS):
        names = [_counts_name(number, part) for number in numbers[begin : begin + THREADS]]
        yield from pool.map(folder.read_array, names)


def _counts_name(number: int, part: str) -> str:
    return f"{WORK}/{number:05d}.{part}.counts.npy"


def _folded_name(fold: int) -> str:
    return f"{WORK}/counts-{fold:05d}.npy"
