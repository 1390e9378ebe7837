"""What a preparation of sequences writes down about them, as JSON: of a unit of work, of a group, and of the text."""

from collections.abc import Sequence
from typing import Any, Literal, NotRequired, TypedDict

Part = Literal["train", "heldout"]
PARTS: tuple[Part, Part] = ("train", "heldout")
META = "meta.json"  # written last: without it the sequences are unfinished


class ReadCounts(TypedDict):
    """What of a text was read, and what could not be (`Invalid`)."""

    skipped: list[str]  # `name: reason` of every file that could not be read
    records: int  # or lines, of plain text; good and bad ones
    bad: int  # of these, left out
    first_bad: list[str]  # `name: reason` of the first of them
    left_out: NotRequired[dict[str, int]]  # sound records, or parts of them, by why they are not used


class Counts(TypedDict):
    """What a part of the text, or of a unit of it, has become."""

    rows: int
    tokens: int
    documents: int
    dropped: int  # tokens of ends of documents that were too short for a row


class UnitRecord(ReadCounts):
    """A unit of work that is packed into files of its host."""

    train: Counts
    heldout: Counts
    blame: str  # the first reason for a bad record that a setting causes
    seconds: float
    sha256: dict[Part, str]  # of the files of sequences


class SourceRecord(ReadCounts):
    """What of a unit's record counts for the whole text."""

    source: int  # its number
    blame: str


class ShardRecord(Counts):
    """One part of a group, which is one shard."""

    digest: str  # SHA-256 of its sequences
    compress_seconds: float
    blocks: list[tuple[int, int, int, str]]  # sequences, offset, size and SHA-256 of each


class GroupRecord(TypedDict):
    """A group that is published."""

    train: ShardRecord
    heldout: ShardRecord
    units: list[SourceRecord]
    seconds: float


class Plan(TypedDict):
    """What decides the files; every host follows the one that came first."""

    shard_bytes: int
    compression: str | None
    units: int  # of work in the whole text


class PartMeta(Counts):
    """One part of the text, in all its shards."""

    digest: str
    shards: int
    bytes: int
    plain_bytes: int  # before compression
    compress_seconds: float  # of one process


class Made(TypedDict):
    """What sequences were made from, and how: who has them needs neither the text nor the settings of then."""

    text: str  # in a few words
    settings: dict[str, Any]  # `Packing.described`
    prompts: bool  # whether ids carry the flags of `sequence_format`


class Meta(ReadCounts, Plan):
    """The text: the content of meta.json."""

    made: Made

    train: PartMeta
    heldout: PartMeta
    duplicates: NotRequired[dict[str, int] | None]  # counts of duplicate documents, where anybody has counted them
    seconds: float  # that its preparation took, over all hosts
    files: dict[str, str]  # SHA-256 of the indices and the counts


def counts_of(parts: Sequence[Counts]) -> Counts:
    """The sums over several parts."""
    return Counts(
        rows=sum(part["rows"] for part in parts),
        tokens=sum(part["tokens"] for part in parts),
        documents=sum(part["documents"] for part in parts),
        dropped=sum(part["dropped"] for part in parts),
    )
