"""Puts the records of all groups together: the index of the shards, the counts of each token, and meta.json.

Any host that finds all records may do it, and two that do write the same. No text and no sequences are read.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256

from distill.data.invalid import Invalid
from distill.data.packing import Packing
from distill.data.shards.check import sealed
from distill.data.shards.destination import WORK, Destination, array_bytes
from distill.data.shards.index import Block, ShardIndex
from distill.data.shards.publish import header, layout_of, record_name
from distill.data.shards.records import (
    META,
    PARTS,
    GroupRecord,
    Made,
    Meta,
    PartMeta,
    Plan,
    ShardRecord,
    SourceRecord,
    counts_of,
)
from distill.data.shards.token_counts import total_counts

THREADS = 16  # that read records


def finish(
    folder: Destination,
    num_groups: int,
    packing: Packing,
    plan: Plan,
    duplicates: dict[str, int] | None = None,
    text: str = "a text",
) -> Meta:
    """Writes what makes the shards of all groups one text, meta.json last, and gives its content.

    Args:
        plan: the settings by which the groups were made, which meta.json repeats.
        duplicates: counts of duplicate documents, where they were counted.
        text: what it is, in a few words.

    Raises:
        SettingError: a setting names a field that no record of a source has.
        FileNotFoundError: another host has finished in the meantime, and removed the records.
    """
    with ThreadPoolExecutor(THREADS) as pool:
        read: Callable[[int], GroupRecord] = lambda number: folder.read_json(record_name(number))  # noqa: E731
        records = list(pool.map(read, range(num_groups)))
    counts = total_counts(folder, num_groups)
    units = [unit for record in records for unit in record["units"]]
    invalid = _invalid(units).counts()
    parts: list[PartMeta] = []
    files: dict[str, bytes] = {}
    for part in PARTS:
        index = ShardIndex.of_shards(
            layout_of(part, packing, plan["compression"]), [_blocks(record[part]["blocks"]) for record in records]
        )
        parts.append(_summary([record[part] for record in records], index))
        files[f"{part}.index"] = index.as_bytes()
        files[f"{part}.counts.npy"] = array_bytes(counts[part])
    for name, content in files.items():
        folder.write(name, content)
    seconds = sum(record["seconds"] for record in records)
    digests = {name: sha256(content).hexdigest() for name, content in files.items()}
    meta = Meta(
        **invalid,
        **plan,
        made=Made(text=text, settings=packing.described, prompts=packing.prompts),
        train=parts[0],
        heldout=parts[1],
        duplicates=duplicates,
        seconds=seconds,
        files=digests,
    )
    folder.write(META, sealed(meta))
    folder.remove(WORK)
    return meta


def _invalid(units: Sequence[SourceRecord]) -> Invalid:
    """What could not be read of the whole text, once every source has shown that its fields are there."""
    by_source: dict[int, list[Invalid]] = {}
    for unit in units:
        by_source.setdefault(unit["source"], []).append(Invalid.of(unit, unit["blame"]))
    for parts in by_source.values():
        Invalid.together(parts).require_fields()
    return Invalid.together(part for parts in by_source.values() for part in parts)


def _blocks(listed: Sequence[tuple[int, int, int, str]]) -> list[Block]:
    return [Block(0, 0, count, offset, size, bytes.fromhex(digest)) for count, offset, size, digest in listed]


def _summary(shards: Sequence[ShardRecord], index: ShardIndex) -> PartMeta:
    """The entry of a part in meta.json."""
    counts = counts_of(shards)
    assert counts["rows"] == index.num_sequences
    return PartMeta(
        **counts,
        digest=_digest(shards, index),
        shards=sum(bool(shard["blocks"]) for shard in shards),
        bytes=int(index.size.sum()),
        plain_bytes=index.num_sequences * index.layout.sequence_bytes,
        compress_seconds=sum(shard["compress_seconds"] for shard in shards),
    )


def _digest(shards: Sequence[ShardRecord], index: ShardIndex) -> str:
    """That of the sequences of a single shard; of several, that of their digests in their order.

    So a text of one shard has the digest that it had before there were shards, which is in checkpoints and teacher
    caches; and of a text of many no process has to read all sequences.
    """
    if len(shards) == 1:
        return str(shards[0]["digest"])
    return sha256(header(index.layout) + "".join(shard["digest"] for shard in shards).encode()).hexdigest()
