"""Sources of text: where a corpus lies, the units of work it falls into, and the documents it holds."""

import glob
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, NamedTuple

from distill.config import Kind, Source
from distill.data import readers
from distill.data.readers import Unreadable, blocks
from distill.data.sources import gutenberg, prose
from distill.errors import SettingError

SHARD_BYTES = 1 << 20  # smaller files are put together up to this size
RANGE_BYTES = 64 << 20  # larger plain files are read in ranges of this size, so that several processes can share one
HUB_ROWS = 20_000  # rows of a Hub data set in one shard

_SUFFIXES = {
    Kind.gutenberg: gutenberg.SUFFIXES,
    Kind.text: (".txt", ".txt.gz"),
    Kind.jsonl: (".jsonl", ".jsonl.gz"),
    Kind.parquet: (".parquet",),
    Kind.wikitext: (".txt", ".txt.gz", ".raw", ".tokens"),
    Kind.imdb: (".txt", ".jsonl", ".jsonl.gz"),
}
_WIKITEXT = {"train": "train.txt", "validation": "valid.txt", "test": "test.txt"}
_WORDS = {
    Kind.gutenberg: "Gutenberg",
    Kind.text: "text",
    Kind.jsonl: "JSONL",
    Kind.parquet: "Parquet",
    Kind.wikitext: "WikiText",
    Kind.imdb: "IMDB",
}


class Document(NamedTuple):
    """A name for messages, and a text whose paragraphs are parted by blank lines."""

    name: str
    text: str


class Shard(NamedTuple):
    """A unit of work: whole files, or the range [start, stop) of one file or Hub data set.

    The range counts bytes of a plain file, row groups of a Parquet file, rows of a Hub data set.
    """

    paths: tuple[str, ...]
    start: int = 0
    stop: int | None = None
    size: int = 0  # stored bytes (rows of a Hub data set), for progress


# --- where it lies -------------------------------------------------------------------------------------------------


def locate(source: Source, setting: str = "corpus") -> Source | None:
    """`source` with its path filled in from $DISTILL_DATA where it has none; None where it is not to be had at all.

    The usual places under $DISTILL_DATA are `gutenberg/<split>`, `wikitext-2-raw/{train,valid,test}.txt`,
    `imdb/<split>.jsonl.gz` and `aclImdb/<split>`. A source without a place there stays a Hub data set if it names one.

    Raises:
        SettingError: a path that was given does not exist, or holds no file of the kind.
    """
    if source.kind is Kind.prose:
        return source
    if source.path is None and (place := _usual_place(source)):
        source = replace(source, path=str(place))
    if source.path is not None:
        files(source, setting)
        return source
    if source.kind is Kind.hub and not source.hub:
        raise SettingError(f"{setting}.hub=null: {setting}.kind=hub needs the name of a data set on the Hub")
    return source if source.hub else None


def _usual_place(source: Source) -> Path | None:
    root = os.environ.get("DISTILL_DATA")
    if not root:
        return None
    data = Path(root).expanduser()
    if not data.is_dir():
        raise SettingError(f"DISTILL_DATA={root}: there is no such folder; correct the variable or unset it")
    places = {
        Kind.gutenberg: [data / "gutenberg" / source.split],
        Kind.wikitext: [data / "wikitext-2-raw" / _WIKITEXT.get(source.split, source.split)],
        Kind.imdb: [
            data / "imdb" / f"{source.split}.jsonl.gz",
            data / "imdb" / "aclImdb" / source.split,
            data / "aclImdb" / source.split,
        ],
    }
    return next((place for place in places.get(source.kind, []) if place.exists()), None)


def files(source: Source, setting: str = "corpus") -> list[Path]:
    """The files behind `source.path` (a file, a folder with all below it, or a glob), sorted by name.

    Raises:
        SettingError: there are none.
    """
    assert source.path is not None
    path = Path(source.path).expanduser()
    if path.is_file():
        return [path]
    suffixes = _SUFFIXES.get(source.kind)
    if suffixes is None:
        raise SettingError(f"{setting}.path={source.path}: kind={source.kind.value} takes no path; set {setting}.kind")
    if path.is_dir():
        found = _below(path, source, suffixes)
        if not found:
            raise SettingError(
                f"{setting}.path={source.path}: no file of kind {source.kind.value} in this folder "
                f"({', '.join('*' + suffix for suffix in suffixes)}); give another folder or {setting}.kind"
            )
        return found
    found = sorted(Path(name) for name in glob.glob(str(path), recursive=True) if os.path.isfile(name))
    if not found:
        raise SettingError(f"{setting}.path={source.path}: no such file or folder; correct the path")
    return found


def _below(root: Path, source: Source, suffixes: tuple[str, ...]) -> list[Path]:
    if source.kind is Kind.imdb:
        if (root / source.split).is_dir():
            root = root / source.split
        if (root / "pos").is_dir() or (root / "neg").is_dir():  # `unsup` and the word lists beside them stay out
            return sorted([*root.glob("pos/*.txt"), *root.glob("neg/*.txt")])
        of_split = [p for p in root.glob("*.jsonl*") if p.name.startswith(f"{source.split}.")]
        return sorted(of_split or root.glob("*.jsonl*"))
    return sorted(p for p in root.rglob("*") if p.name.lower().endswith(suffixes) and p.is_file())


def describe(source: Source) -> str:
    """A few words for the banner, such as `146 Gutenberg files in PATH`."""
    if source.kind is Kind.prose:
        return prose.describe()
    share = f", {source.share:.3g} of its documents" if source.share < 1 else ""
    if source.path is None:
        subset = f"{source.subset}, " if source.subset else ""
        return f"Hub data set {source.hub} ({subset}split {source.split}){share}"
    count = len(files(source))
    word = _WORDS[source.kind]
    return (f"{word} file {source.path}" if count == 1 else f"{count:,} {word} files in {source.path}") + share


# --- units of work -------------------------------------------------------------------------------------------------


def shards(source: Source, setting: str = "corpus") -> list[Shard]:
    """The units of work of a source that `locate` has found, in the order of its documents."""
    if source.path is None:
        return _hub_shards(source, setting)
    found: list[Shard] = []
    group: list[str] = []
    size = 0
    for path in files(source, setting):
        bytes_ = path.stat().st_size
        if size and size + bytes_ > SHARD_BYTES:
            found.append(Shard(tuple(group), size=size))
            group, size = [], 0
        if bytes_ > SHARD_BYTES and (ranges := _ranges(path, source.kind, bytes_)):
            found += ranges
        else:
            group.append(str(path))
            size += bytes_
    return [*found, Shard(tuple(group), size=size)] if group else found


def _ranges(path: Path, kind: Kind, size: int) -> list[Shard]:
    """Ranges of about RANGE_BYTES of a file that can be entered in the middle; none where it cannot."""
    if path.suffix == ".parquet":
        return _row_groups(path, size)
    if kind is Kind.gutenberg or path.suffix in (".gz", ".zip"):
        return []
    cuts = [*range(0, size, RANGE_BYTES), size]
    return [Shard((str(path),), a, b, b - a) for a, b in pairwise(cuts)]


def _row_groups(path: Path, size: int) -> list[Shard]:
    import pyarrow
    import pyarrow.parquet

    try:
        count = pyarrow.parquet.ParquetFile(path).num_row_groups
    except (pyarrow.ArrowException, OSError):
        return []  # the reader will say what is wrong with it
    step = max(1, count * RANGE_BYTES // size)
    cuts = [*range(0, count, step), count]
    return [Shard((str(path),), a, b, size * (b - a) // count) for a, b in pairwise(cuts)]


def _hub_shards(source: Source, setting: str) -> list[Shard]:
    assert source.hub is not None
    if source.streaming:
        return [Shard(())]
    rows = len(readers.load_hub(source.hub, source.subset, source.split, False, setting))
    cuts = [*range(0, rows, HUB_ROWS), rows]
    return [Shard((), a, b, b - a) for a, b in pairwise(cuts)]


def fingerprint(source: Source, setting: str = "corpus") -> list[tuple[Any, ...]]:
    """What changes when the contents of a located source change: names, sizes and times of the files behind it.

    A streamed Hub data set is known by its revision, or by its name alone where the Hub cannot be asked.
    """
    paths = files(source, setting) if source.path is not None else []
    if source.path is None and source.hub is not None:
        if source.streaming:
            return [("stream", readers.hub_revision(source.hub))]
        data = readers.load_hub(source.hub, source.subset, source.split, False, setting)
        paths = [Path(file["filename"]) for file in data.cache_files]
    return [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in paths]


# --- documents -----------------------------------------------------------------------------------------------------


def _stop(error: Unreadable) -> None:
    raise error


def documents(
    shard: Shard, source: Source, setting: str = "corpus", unreadable: Callable[[Unreadable], None] = _stop
) -> Iterator[Document]:
    """The documents of a shard, in order, in bounded memory; of them the seeded share `source.share`.

    A file that cannot be read goes to `unreadable`, which raises it unless told otherwise; what was read of the file
    up to there stays.
    """
    paths: list[Path | None] = [Path(path) for path in shard.paths]
    for path in paths or [None]:
        empty = True
        try:
            for name, text in _texts(path, shard, source, setting):
                if text:
                    empty = False
                    if source.share >= 1 or fraction(text, "share") < source.share:
                        yield Document(name, text)
            if empty and path is not None and shard.stop is None:
                raise Unreadable(path.name, "no text in it")
        except Unreadable as error:
            unreadable(error)


def _texts(path: Path | None, shard: Shard, source: Source, setting: str) -> Iterator[tuple[str, str]]:
    if path is not None and source.kind is Kind.gutenberg:
        yield from gutenberg.books(path)
        return
    name = source.hub or "" if path is None else path.name
    texts = _from_hub(shard, source, setting) if path is None else _from_file(path, shard, source, setting)
    for number, text in enumerate(texts):
        yield f"{name}#{number}", text


def _from_file(path: Path, shard: Shard, source: Source, setting: str) -> Iterator[str]:
    span = (shard.start, shard.stop)
    if path.suffix == ".parquet":
        texts = readers.columns(path, source.field, setting, *span)
    elif ".jsonl" in path.suffixes or source.kind is Kind.jsonl:
        texts = readers.records(path, source.field, setting, *span)
    elif source.kind is Kind.wikitext:
        return readers.wikitext(path, *span)
    elif source.kind is Kind.imdb:
        return readers.review_file(path)
    else:
        return readers.pieces(path, *span)
    return map(readers.review, texts) if source.kind is Kind.imdb else texts


def _from_hub(shard: Shard, source: Source, setting: str) -> Iterable[str]:
    assert source.hub is not None
    rows = readers.load_hub(source.hub, source.subset, source.split, source.streaming, setting)
    if not source.streaming:
        rows = rows.select(range(shard.start, shard.stop or len(rows)))
    texts = readers.hub_texts(rows, source.field, source.hub, setting)
    if source.kind is Kind.wikitext:  # on the Hub every line is a row
        return readers.articles(texts)
    clean = {Kind.gutenberg: gutenberg.clean, Kind.imdb: readers.review}.get(source.kind, str.strip)
    return map(clean, texts)


def fraction(text: str, purpose: str) -> float:
    """A number in [0, 1) drawn from the text alone: the same on every machine, another one for each purpose."""
    digest = blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8, person=purpose.encode()).digest()
    return int.from_bytes(digest, "big") / 2**64


# --- what is held out ----------------------------------------------------------------------------------------------

FEW = 50  # documents
BLOCK = 8 << 10  # characters


@dataclass(frozen=True)
class HeldOut:
    """Which part of the text training never sees, decided by the text alone.

    A document is held out when its `fraction` lies below `share`. Of fewer than 50 documents that could take none, or
    far too much, so there the rule works on blocks of whole paragraphs of about 8 KiB: the share of them with the
    lowest fractions is held out, at least one.
    """

    share: float
    by_block: bool = False

    def parts(self, text: str) -> Iterator[tuple[bool, str]]:
        """(held out?, text) for each stretch of a document that falls to one part; the stretches follow each other."""
        if not self.by_block:
            yield self._below(text), text
            return
        stretch: list[str] = []
        held = False
        for block in blocks(text, BLOCK):
            if stretch and self._below(block) != held:
                yield held, "".join(stretch)
                stretch = []
            held = self._below(block)
            stretch.append(block)
        if stretch:
            yield held, "".join(stretch)

    def _below(self, text: str) -> bool:
        return self.share > 0 and fraction(text, "heldout") < self.share


def held_out(share: float, texts: Iterable[str]) -> HeldOut:
    """The rule for a corpus of these documents, of which at most the first 50 are looked at."""
    first = list(islice(texts, FEW)) if share else []
    if not first or len(first) == FEW:
        return HeldOut(share)
    drawn = sorted(fraction(block, "heldout") for text in first for block in blocks(text, BLOCK))
    count = min(max(1, round(share * len(drawn))), len(drawn) - 1)
    return HeldOut(drawn[count], by_block=True)  # strictly below: exactly `count` blocks (more only of repeated text)
