"""The units of work of a text, which of them are read, what is held out of them, and which become one shard.

The sizes of files alone decide how the work is divided, so that every host divides it alike.
"""

import math
from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np

from distill.data.find_files import COMPRESSED
from distill.data.heldout import HeldOut, held_out
from distill.data.sources import Shard, Source, read, shards_of
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
    held_out: HeldOut = HeldOut(0.0)  # of its source
    trains: bool = True  # whether its text is trained on; else it is read for what is held out of it


def work_of(sources: Sequence[Source]) -> list[Work]:
    """All units of work, in the order of the text."""
    return [Work(shard, source) for source in sources for shard in shards_of(source)]


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
    if fraction == 1:
        return list(work)
    chosen = {*shuffled(np.arange(round(fraction * len(work))), len(work), key(0, "units of work")).tolist()}
    marked = [unit._replace(trains=number in chosen) for number, unit in enumerate(work)]
    # The size of a Hub data set is in rows.
    is_large = sum(unit.shard.size * (1 if unit.shard.paths else BYTES_PER_ROW) for unit in work) > LARGE
    return [unit for unit in marked if unit.trains or not is_large]


def with_rules(fraction: float, work: Sequence[Work]) -> list[Work]:
    """The units with the rule for what their source holds out: a few books beside thousands of texts are few."""
    ruled: list[Work] = []
    for _, of_source in groupby(work, lambda unit: id(unit.source)):
        units = list(of_source)
        rule = held_out_rule(fraction, units)
        ruled += [unit._replace(held_out=rule) for unit in units]
    return ruled


def held_out_rule(fraction: float, work: Sequence[Work]) -> HeldOut:
    """The rule for what these units hold, of which it reads the first documents."""
    return held_out(fraction, (document for unit in work for document in read(unit.source, unit.shard)))


def divide(work: Sequence[Work], dtype: np.dtype, shard_bytes: int) -> list[range]:
    """Which units make each shard, whose sequences of ids of `dtype` take about `shard_bytes`, or less of a small text.

    A unit that takes more is a shard. There is at least one, which may be empty.
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
    if not shard.size:
        return UNKNOWN / BYTES_PER_TOKEN
    if not shard.paths:
        return shard.size * BYTES_PER_ROW / BYTES_PER_TOKEN
    return shard.size * (UNPACKED if shard.paths[0].lower().endswith(PACKED) else 1) / BYTES_PER_TOKEN
