"""Divides the work on a text into groups, each of which becomes one shard of every part.

Every host divides alike, without reading any text: the size of the sequences is estimated from that of the files.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from distill.data.heldout import HeldOut
from distill.data.lines import COMPRESSED
from distill.data.sources import Shard, Source, shards_of

# Bytes of a text for each of its tokens, and of an unpacked text for each of its packed ones: about what English has.
BYTES_PER_TOKEN = 4.3
UNPACKED = 2.7
PACKED = (*COMPRESSED, ".zip", ".parquet")
BYTES_PER_ROW = 2000  # of text, of a row of a Hub data set
UNKNOWN = 64 << 20  # bytes of text that a unit of a user's own source is taken to have where its size is unknown


class Work(NamedTuple):
    """A unit of work: a shard of a source, which one process packs into sequences."""

    shard: Shard
    source: Source
    held_out: HeldOut = HeldOut(0.0)  # of its source


class Group(NamedTuple):
    """Consecutive units of work, whose sequences become the shards of this number."""

    number: int
    first: int  # the number of its first unit
    work: tuple[Work, ...]

    @property
    def size(self) -> int:
        """As its shards count it: stored bytes, or rows of a Hub data set."""
        return sum(unit.shard.size for unit in self.work)


def unit_stem(scratch: Path, group: Group, unit: int) -> str:
    """How the names of all files about a unit of a group begin: they end in its number in the whole text."""
    return str(scratch / f"{group.number:05d}" / f"{group.first + unit:06d}")


def work_of(sources: Sequence[Source]) -> list[Work]:
    """All units of work, in the order of the text."""
    return [Work(shard, source) for source in sources for shard in shards_of(source)]


def divide(work: Sequence[Work], dtype: np.dtype, shard_bytes: int) -> list[Group]:
    """Groups whose sequences take about `shard_bytes`; a unit that takes more is a group. At least one, maybe empty.

    Args:
        dtype: of the ids in a sequence.
    """
    groups: list[Group] = []
    first = 0
    for number, units in enumerate(_consecutive(work, dtype, shard_bytes)):
        groups.append(Group(number, first, tuple(units)))
        first += len(units)
    return groups


def _consecutive(work: Sequence[Work], dtype: np.dtype, shard_bytes: int) -> Iterator[list[Work]]:
    group: list[Work] = []
    size = 0.0
    for unit in work:
        expected = expected_bytes(unit.shard, dtype)
        if group and size + expected > shard_bytes:
            yield group
            group, size = [], 0.0
        group.append(unit)
        size += expected
    yield group


def expected_bytes(shard: Shard, dtype: np.dtype) -> float:
    """About how many bytes the sequences of a unit of work take."""
    return expected_tokens(shard) * dtype.itemsize


def expected_tokens(shard: Shard) -> float:
    """About how many tokens a unit of work has."""
    text = float(shard.size or UNKNOWN)
    if not shard.paths:
        text = shard.size * BYTES_PER_ROW if shard.size else UNKNOWN
    elif shard.paths[0].lower().endswith(PACKED):
        text *= UNPACKED
    return text / BYTES_PER_TOKEN
