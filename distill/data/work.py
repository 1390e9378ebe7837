"""The work on a text: its units, and which of them become one shard.

It is divided without reading any text, from the sizes of its files, so that every host divides it alike.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from distill.data.find_files import COMPRESSED
from distill.data.heldout import HeldOut
from distill.data.sources import Shard, Source, shards_of
from distill.runtime.seed import key, shuffled

# Bytes of a text for each of its tokens, and of an unpacked text for each of its packed ones: about what English has.
BYTES_PER_TOKEN = 4.3
UNPACKED = 2.7
PACKED = (*COMPRESSED, ".zip", ".parquet")
BYTES_PER_ROW = 2000  # of text, of a row of a Hub data set
UNKNOWN = 64 << 20  # bytes of text that a unit of a user's own source is taken to have where its size is unknown
SPARE = 1.5  # sequences made for each one needed, as the sizes of files are a rough measure
FEWEST = 8  # units that are trained on where not all are needed, so that they come from all over the text
LARGE = 1 << 30  # stored bytes up to which all of a text is read for what is held out of it
MANY_SHARDS = 64  # that a small text is divided into, so that all processes have some ...
SMALLEST = 1 << 20  # ... bytes of sequences that a shard has all the same


class Work(NamedTuple):
    """A unit of work: a range or some files of a source, which become sequences by themselves."""

    shard: Shard
    source: Source
    number: int = 0  # of its source
    held_out: HeldOut = HeldOut(0.0)  # of its source
    trains: bool = True  # whether its text is trained on; else it is read for what is held out of it


def work_of(sources: Sequence[Source]) -> list[Work]:
    """All units of work, in the order of the text."""
    return [Work(shard, source, number) for number, source in enumerate(sources) for shard in shards_of(source)]


def fraction_needed(work: Sequence[Work], tokens: float) -> float:
    """Which fraction of these units gives so many tokens; 1 where nobody knows the size of all of them."""
    expected = sum(unit.source.fraction * expected_tokens(unit.shard) for unit in work)
    if not expected or not all(unit.shard.size for unit in work):
        return 1.0
    return min(1.0, max(FEWEST, math.ceil(SPARE * tokens / expected * len(work))) / len(work))


def some_of(work: Sequence[Work], fraction: float) -> list[Work]:
    """The units, of which a seeded choice is trained on; of a large text only these are read.

    The units of a smaller fraction are among those of a larger one.
    """
    count = round(fraction * len(work))
    chosen = {*shuffled(np.arange(count), len(work), key(0, "units of work")).tolist()} if fraction < 1 else None
    marked = [unit._replace(trains=chosen is None or number in chosen) for number, unit in enumerate(work)]
    # The size of a Hub data set is in rows.
    is_large = sum(unit.shard.size * (1 if unit.shard.paths else BYTES_PER_ROW) for unit in work) > LARGE
    return [unit for unit in marked if unit.trains or not is_large]


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
