"""The work on a text: its units, and which of them become one shard.

It is divided without reading any text, from the sizes of its files, so that every host divides it alike.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from distill.data.find_files import COMPRESSED
from distill.data.heldout import HeldOut
from distill.data.sources import Shard, Source, shards_of

# Bytes of a text for each of its tokens, and of an unpacked text for each of its packed ones: about what English has.
BYTES_PER_TOKEN = 4.3
UNPACKED = 2.7
PACKED = (*COMPRESSED, ".zip", ".parquet")
BYTES_PER_ROW = 2000  # of text, of a row of a Hub data set
UNKNOWN = 64 << 20  # bytes of text that a unit of a user's own source is taken to have where its size is unknown
MANY_SHARDS = 64  # that a small text is divided into, so that all processes have some ...
SMALLEST = 1 << 20  # ... bytes of sequences that a shard has all the same


class Work(NamedTuple):
    """A unit of work: a range or some files of a source, which become sequences by themselves."""

    shard: Shard
    source: Source
    number: int = 0  # of its source
    held_out: HeldOut = HeldOut(0.0)  # of its source


def work_of(sources: Sequence[Source]) -> list[Work]:
    """All units of work, in the order of the text."""
    return [Work(shard, source, number) for number, source in enumerate(sources) for shard in shards_of(source)]


def divide(work: Sequence[Work], dtype: np.dtype, shard_bytes: int) -> list[range]:
    """The numbers of the units of each shard, whose sequences take about `shard_bytes`, or less of a small text.

    A unit that takes more is a shard. There is at least one, which may be empty.

    Args:
        dtype: of the ids in a sequence.
    """
    sizes = [expected_tokens(unit.shard) * dtype.itemsize for unit in work]
    limit = min(shard_bytes, max(SMALLEST, sum(sizes) / MANY_SHARDS))
    shards, first, taken = list[range](), 0, 0.0
    for number, size in enumerate(sizes):
        if number > first and taken + size > limit:
            shards.append(range(first, number))
            first, taken = number, 0.0
        taken += size
    return [*shards, range(first, len(work))]


def expected_tokens(shard: Shard) -> float:
    """About how many tokens a unit of work has."""
    text = float(shard.size or UNKNOWN)
    if not shard.paths:
        text = shard.size * BYTES_PER_ROW if shard.size else UNKNOWN
    elif shard.paths[0].lower().endswith(PACKED):
        text *= UNPACKED
    return text / BYTES_PER_TOKEN
