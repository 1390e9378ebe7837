"""Publishes a group: its sequences become one shard of every part, and its record lists them.

The record is written last, so whoever reads it finds the shards. N sequences, S positions, V = length of the tokenizer.
"""

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np

from distill.config.data import Duplicates
from distill.data.duplicates import merge_digests, records_name
from distill.data.invalid import Invalid
from distill.data.packing import Packing
from distill.data.sequence_format import IDS
from distill.data.shards.destination import WORK, Destination, array_bytes
from distill.data.shards.index import Block, Layout
from distill.data.shards.records import PARTS, GroupRecord, ShardRecord, SourceRecord, UnitRecord, counts_of
from distill.data.shards.token_counts import write_counts

BLOCK_BYTES = 16 << 20  # of sequences that are not compressed
LEVEL = 3  # of zstd


@dataclass(frozen=True)
class Publication:
    """A group whose units of work are packed, and where it goes."""

    number: int
    stems: tuple[str, ...]  # of the files that its units of work were packed into, in their order
    sources: tuple[int, ...]  # the number of each one's source
    seconds: float  # that packing them took this host
    folder: Destination
    scratch: Path
    compression: str | None


class WrittenShard(NamedTuple):
    """What became of the sequences of one part of a group."""

    blocks: list[Block]
    counts: np.ndarray  # [V] int64
    digest: str  # sha256 of the sequences, after a line about their form (`header`)
    compress_seconds: float


def layout_of(part: str, packing: Packing, compression: str | None) -> Layout:
    return Layout(part, packing.dtype.name, packing.sequence_length, compression)


def publish(publication: Publication, packing: Packing) -> GroupRecord:
    """Writes the shards, the counts and the record of a group, and gives the record."""
    begun = time.perf_counter()
    records: list[UnitRecord] = [json.loads(Path(f"{stem}.json").read_text()) for stem in publication.stems]
    parts: list[ShardRecord] = []
    for part in PARTS:
        files = [Path(f"{stem}.{part}") for stem in publication.stems]
        shard = _write_shard(publication, files, layout_of(part, packing, publication.compression), packing)
        write_counts(publication.folder, publication.number, part, shard.counts)
        counts = counts_of([unit[part] for unit in records])
        blocks = [(block.sequences, block.offset, block.size, block.digest.hex()) for block in shard.blocks]
        seconds = shard.compress_seconds
        parts.append(ShardRecord(**counts, digest=shard.digest, compress_seconds=seconds, blocks=blocks))
    if packing.duplicates is Duplicates.count:
        first = int(Path(publication.stems[0]).name) if publication.stems else 0
        publication.folder.write(records_name(publication.number), array_bytes(merge_digests(publication.stems, first)))
    units = [
        SourceRecord(**Invalid.of(unit).counts(), blame=unit["blame"], source=source)
        for unit, source in zip(records, publication.sources, strict=True)
    ]
    seconds = publication.seconds + time.perf_counter() - begun
    record = GroupRecord(train=parts[0], heldout=parts[1], units=units, seconds=seconds)
    publication.folder.write(record_name(publication.number), json.dumps(record).encode())
    return record


def record_name(number: int) -> str:
    return f"{WORK}/{number:05d}.json"


def _write_shard(publication: Publication, files: list[Path], layout: Layout, packing: Packing) -> WrittenShard:
    """Writes the sequences in these files as one shard; a part without sequences has none."""
    if not sum(file.stat().st_size for file in files):
        return _write(files, None, layout, packing)
    with (
        publication.folder.written(layout.shard_name(publication.number), publication.scratch) as path,
        path.open("wb") as out,
    ):
        return _write(files, out, layout, packing)


def _write(files: Sequence[Path], out: IO[bytes] | None, layout: Layout, packing: Packing) -> WrittenShard:
    counts = np.zeros(max(packing.vocabulary, packing.format.pad + 1), np.int64)
    shard_digest = sha256(header(layout))
    blocks: list[Block] = []
    offset, seconds = 0, 0.0
    for block in _blocks(files, max(1, BLOCK_BYTES // layout.sequence_bytes) * layout.sequence_bytes):
        assert out is not None
        shard_digest.update(block)
        ids = np.frombuffer(block, layout.dtype)
        counts += np.bincount(ids & IDS if packing.prompts else ids, minlength=len(counts))
        begun = time.perf_counter()
        stored = compressed(block, layout.compression)
        seconds += time.perf_counter() - begun
        out.write(stored)
        blocks.append(Block(0, 0, len(block) // layout.sequence_bytes, offset, len(stored), sha256(stored).digest()))
        offset += len(stored)
    return WrittenShard(blocks, counts[: packing.vocabulary], shard_digest.hexdigest(), seconds)


def header(layout: Layout) -> bytes:
    """The head of a digest before the sequences, so that sequences of another form have another one."""
    return f"{layout.dtype} {layout.sequence_length}\n".encode()


def _blocks(files: Sequence[Path], size: int) -> Iterator[memoryview]:
    """The content of files one after the other, in blocks of `size` bytes, of which each is gone with the next."""
    buffer = memoryview(bytearray(size))
    filled = 0
    for file in files:
        with file.open("rb", buffering=0) as content:
            while count := content.readinto(buffer[filled:]):
                filled += count
                if filled == size:
                    yield buffer
                    filled = 0
    if filled:
        yield buffer[:filled]


def compressed(block: memoryview, compression: str | None) -> bytes | memoryview:
    """The bytes of a block as they are stored."""
    if compression is None:
        return block
    import pyarrow

    # Arrow's own buffer would be longer than what is in it.
    stored: bytes = pyarrow.Codec(compression, LEVEL).compress(pyarrow.py_buffer(block), asbytes=True)
    return stored
