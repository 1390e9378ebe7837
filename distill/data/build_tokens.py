"""Builds the token sequences of a text: any number of hosts take groups of its work, each with several processes.

A group is packed by the processes of one host, unit by unit, into files of its own disk, and published as shards. What
is published is final; of a group that was begun, the units that are done stay on the disk of their host.
"""

import json
import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import groupby
from pathlib import Path

from distill.config.data import Duplicates
from distill.config.settings import DataConfig
from distill.data.duplicates import count_duplicates
from distill.data.first_pass import FirstPass
from distill.data.heldout import HeldOut, held_out
from distill.data.packing import Packing
from distill.data.remote import reachable
from distill.data.shards.check import read_meta
from distill.data.shards.claims import Claims, owner_of
from distill.data.shards.destination import WORK, Destination
from distill.data.shards.finish import finish
from distill.data.shards.groups import Work, divide, work_of
from distill.data.shards.host import Host
from distill.data.shards.records import META, PARTS, Meta, Plan
from distill.data.sources import Source, read
from distill.runtime.errors import SettingError
from distill.runtime.files import remove

LOOKED_AT = 1 << 30  # stored bytes in which the first 50 documents are looked for
PLAN = f"{WORK}/plan.json"

logger = logging.getLogger(__name__)


def build(
    folder: Destination, name: str, sources: Sequence[Source], packing: Packing, data: DataConfig, scratch: Path
) -> None:
    """Fill `folder` with the sequences of these sources; one that was cut short resumes.

    Args:
        name: of the text, for messages.
        scratch: a folder of this host alone, in which it may resume.

    Raises:
        SettingError: a setting names a field that no record of a source has, or another version has begun the folder.
    """
    part, work = packing.part.units(work_of(sources))
    logger.info(f"preparing tokens of {name}{_announced(packing)}")
    packing, work = replace(packing, part=part), with_rules(packing.held_out.share, work)
    scratch.mkdir(parents=True, exist_ok=True)
    try:
        plan = _agreed_plan(folder, work, data)
        groups = divide(work, packing.dtype, plan["shard_bytes"])
        with Claims(folder, owner_of(scratch)) as claims:
            duplicates = None
            if packing.duplicates in (Duplicates.drop, Duplicates.near):
                near = packing.near if packing.duplicates is Duplicates.near else None
                duplicates = FirstPass(folder, groups, near, scratch, claims, data).find()
            Host(folder, groups, packing, plan["compression"], scratch, claims, data).work()
        if packing.duplicates is Duplicates.count:
            duplicates = count_duplicates(folder, len(groups), scratch)
        meta = finish(folder, len(groups), packing, plan, duplicates, name)
    except FileNotFoundError:
        if not folder.exists(META):
            raise
        meta = read_meta(folder.place)  # another host did the rest in the meantime
    folder.remove(WORK)
    with suppress(FileNotFoundError):  # a host with the same cache may have taken this one for gone
        remove(scratch)
    _announce(meta, packing)


def _announced(packing: Packing) -> str:
    """What of the text is used, where not all of it is."""
    if packing.part.whole:
        return ""
    return f": of about 1/{round(1 / packing.part.share)} of it, as few sequences are needed"


def _announce(meta: Meta, packing: Packing) -> None:
    tokens, seconds = num_tokens(meta), meta["seconds"]
    logger.info(f"prepared {tokens:,} tokens in {seconds:.1f} s: {rate(meta):,.0f} tokens a second")
    if dropped := sum(meta[part]["dropped"] for part in PARTS):
        shortest = f"documents, and ends of documents, of fewer than {packing.format.shortest} tokens"
        what = f"{shortest}, and last sentences that make no pair" if packing.format.pairs else shortest
        logger.info(f"left out {dropped:,} tokens ({dropped / (tokens + dropped):.1%}): {what}")


def _agreed_plan(folder: Destination, work: Sequence[Work], data: DataConfig) -> Plan:
    """The settings that decide the files: those of whichever host came first, which all others follow."""
    plan_here = Plan(shard_bytes=data.shard_bytes, compression=data.compression, units=len(work))
    # The first file that is written shows whether that is possible at all.
    with reachable("data.tokens", folder.place):
        is_first = folder.create(PLAN, json.dumps(plan_here).encode())
    if is_first:
        if folder.exists(META):  # another host has just finished
            raise FileNotFoundError(PLAN)
        return plan_here
    plan: Plan = folder.read_json(PLAN)
    if plan["units"] != len(work):
        raise SettingError(
            f"data.tokens={folder.place}: its preparation was begun by a version of Distill that divides the text in "
            f"{plan['units']:,} units of work, not {len(work):,}; resume with that version, or remove {folder.place}"
        )
    if plan != plan_here:
        logger.info(
            f"resuming the preparation as it was begun, with data.shard_bytes={plan['shard_bytes']}, "
            f"data.compression={plan['compression']}"
        )
    return plan


def with_rules(fraction: float, work: Sequence[Work]) -> list[Work]:
    """The same units with the rule for what their source holds: a few books beside thousands of texts are few."""
    ruled: list[Work] = []
    for _, of_source in groupby(work, lambda unit: id(unit.source)):
        units = list(of_source)
        rule = held_out_rule(fraction, units)
        ruled += [unit._replace(held_out=rule) for unit in units]
    return ruled


def held_out_rule(fraction: float, work: Sequence[Work]) -> HeldOut:
    """The rule for what these units hold, of which it looks at the first documents.

    It reads a GiB at most, in which there are fewer only where few of the documents count, as with a tiny
    `corpus.fraction`; then it goes by how many there should be in all.
    """
    first = _first(work)
    read_bytes, all_bytes = (sum(unit.shard.size for unit in units) for units in (first, work))
    documents = (document for unit in first for document in read(unit.source, unit.shard))
    return held_out(fraction, documents, read_bytes / all_bytes if read_bytes else 1.0)


def _first(work: Sequence[Work]) -> Sequence[Work]:
    size = 0
    for number, unit in enumerate(work):
        if size >= LOOKED_AT:
            return work[:number]
        size += unit.shard.size
    return work


def num_tokens(meta: Meta) -> int:
    """Of both parts."""
    return int(sum(meta[part]["tokens"] for part in PARTS))


def rate(meta: Meta) -> float:
    """Tokens a second of one host of the preparation, both parts together."""
    return num_tokens(meta) / max(meta["seconds"], 1e-9)
