"""What the sources of files and Hub data sets have in common: where they lie, their shards, and reading one of them."""

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, Self

from distill.config.settings import DataConfig, SourceConfig
from distill.data import readers
from distill.data.chat_template import holds_messages
from distill.data.encodings import check_encoding
from distill.data.find_files import data_folder, files_below, find_files, without_other_splits
from distill.data.lines import InvalidFile, InvalidRecord, LeftOut, Record, compression_of, plain_name
from distill.data.remote import for_each, is_url, path_of, size_of
from distill.data.separated import is_table, separated_rows
from distill.data.sources import Document, Part, Shard, Source
from distill.runtime.errors import SettingError

logger = logging.getLogger(__name__)

SHARD_BYTES = 1 << 20  # smaller files are put together up to this size
RANGE_BYTES = 64 << 20  # larger plain files are read in ranges of this size, so that several processes can share one
SHARD_ROWS = 20_000  # rows of a Hub data set in one shard

# Names of files whose text stands between marks of a format that no kind reads.
NO_TEXT = (".json", ".xml", ".html", ".htm", ".pdf", ".doc", ".docx", ".odt", ".rtf", ".epub", ".xls", ".xlsx")

MAX_WRONG = 1000  # records without a field, before the first that has it

Content = str | tuple[Part, ...] | Document  # a text, its parts where there are prompts, or token ids
Found = Content | InvalidRecord | LeftOut  # in the place of a record


def is_jsonl(path: Path) -> bool:
    """Whether the name of a file is that of a JSON Lines file."""
    return ".jsonl" in [suffix.lower() for suffix in path.suffixes]


def is_parquet(path: Path) -> bool:
    return path.suffix.lower() == ".parquet"


def is_records(path: Path) -> bool:
    """Whether a file holds records by its name, of whatever kind it is called: one of Parquet, JSONL, CSV or TSV."""
    return is_parquet(path) or is_jsonl(path) or is_table(path)


@dataclass(frozen=True)
class FileSource(Source):
    """Files of one kind at `settings.path`, or a data set of the Hub.

    A kind defines which files are its own, where they usually are under $DISTILL_DATA, and how one is read.
    """

    settings: SourceConfig
    setting: str  # what error lines call the settings

    word: ClassVar[str]  # for the banner
    suffixes: ClassVar[tuple[str, ...]]  # of the files that are taken from a folder
    text_only: ClassVar[bool] = False  # whether a file of another name than those below is read as it is
    by_split: ClassVar[bool] = False  # whether files of a folder that are called like another split are left out
    ranges: ClassVar[bool] = True  # whether a plain file can be entered in the middle
    takes: ClassVar[tuple[str, ...]] = ()  # which of the settings OPTIONAL it reads
    usual_field: ClassVar[str] = "text"
    hub_names: ClassVar[tuple[str, ...]] = ()  # data sets of which the usual paths hold copies
    hub_subsets: ClassVar[tuple[str, ...]] = ()  # the subsets of these that they hold; of other subsets none

    @classmethod
    def find(cls, settings: SourceConfig, setting: str, data: DataConfig) -> Self | None:
        """The source with its path filled in from $DISTILL_DATA where it has none; a Hub data set if it names one."""
        is_copy = settings.subset is None or not cls.hub_subsets or settings.subset in cls.hub_subsets
        copied = settings.hub is None or (settings.hub in cls.hub_names and is_copy)
        if settings.path is None and copied and (usual := cls._usual_path(settings.split)):
            settings = settings.changed(path=str(usual))
        if settings.path is not None and readers.is_saved(settings.path):
            settings = settings.changed(path=None, hub=settings.path, streaming=False)
        check_encoding(settings.encoding, setting)
        source = cls(settings, setting)
        if settings.path is not None:
            _ = source.files  # refuses a path without any
            return source
        return source if settings.hub else None

    # What a kind may override.

    @classmethod
    def usual_paths(cls, data: Path, split: str) -> list[Path]:
        """Where a split usually is below the folder $DISTILL_DATA."""
        return []

    def below(self, root: Path) -> list[Path]:
        """The files of a folder that belong to the source."""
        files = files_below(root, self.suffixes)
        return self.of_split(files, root) if self.by_split else files

    def of_split(self, files: list[Path], root: Path) -> list[Path]:
        """Those of the files below `root` that are not called like another split than that of the settings."""
        kept = without_other_splits(files, root, self.settings.split)
        if left_out := sorted({*files} - {*kept}):
            logger.info(
                f"{self.setting}.path={root}: {len(left_out):,} files of other splits than {self.settings.split} are "
                f"left out, such as {left_out[0]}"
            )
        return kept

    def read(self, path: Path, start: int, stop: int | None) -> Iterator[Found]:
        """The texts of a file, or of the lines that begin in its bytes [start, stop)."""
        raise NotImplementedError

    def clean(self, text: str) -> str:
        """A text that came as a field of a record."""
        return text

    def content(self, record: Record, name: str) -> Content:
        """The text of a record of a file or data set of this name, after its prompt where it has one; may be empty."""
        for setting, field in (("field", self.field), ("prompt", self.settings.prompt)):
            if field is not None and holds_messages(record.get(field)):
                raise SettingError(
                    f"in {name} it holds conversations, not text",
                    setting=f"{self.setting}.{setting}",
                    value=field,
                    cure=f"set {self.setting}.kind=chat",
                )
        text = self.clean(readers.value_of(record, self.field, name, f"{self.setting}.field", str))
        if self.settings.prompt is None:
            return text
        prompt = readers.value_of(record, self.settings.prompt, name, f"{self.setting}.prompt", str)
        return (Part(prompt, loss=False), Part(text)) if text else ()

    def named(self, path: Path, start: int, stop: int | None) -> Iterator[tuple[str, Found]]:
        """Name and content of everything in a file or a range of it."""
        for number, content in enumerate(self._from_file(path, start, stop)):
            yield f"{path.name}#{number}", content

    # What all kinds have in common.

    @property
    def field(self) -> str:
        """The column that holds the text."""
        return self.settings.field or self.usual_field

    @property
    def prompts(self) -> bool:  # type: ignore[override]
        return self.settings.prompt is not None

    @property
    def written(self) -> list[Any]:
        """Of the identity, where it has prompts: what decides which of the text counts, and what surrounds it."""
        return [self.settings.prompt, self.settings.template]

    @property
    def counted(self) -> str:
        """What of the text counts, for the banner, where that is not all."""
        return f", after prompts in {self.settings.prompt}" if self.settings.prompt is not None else ""

    @property
    def nothing(self) -> str:
        """Why a file without a document is left out."""
        return "no text in it"

    @property
    def columns(self) -> dict[str, str]:
        """The columns that it reads, by the setting that names each."""
        columns = {f"{self.setting}.field": self.field}
        if self.settings.prompt is not None:
            columns[f"{self.setting}.prompt"] = self.settings.prompt
        return columns

    def parquet_columns(self, path: Path) -> dict[str, str]:
        """The columns that it reads of a Parquet file, by the setting that names each."""
        return self.columns

    def of_columns(self, row: Record | InvalidRecord) -> Record | InvalidRecord:
        """A row of a Parquet file or a data set of `datasets` as the record that it stands for."""
        return row

    def from_jsonl(self, path: Path, start: int, stop: int | None) -> Iterator[Found]:
        behind = f", after byte {start:,}" if start else ""
        records = readers.records(path, start, stop, self.settings.encoding)
        return self.contents(records, f"{path.name}{behind}, record", start)

    def from_parquet(self, path: Path, start: int, stop: int | None) -> Iterator[Found]:
        behind = f", from row group {start:,} on" if start else ""
        rows = readers.columns(path, self.parquet_columns(path), start, stop, not self.several)
        return self.contents(map(self.of_columns, rows), f"{path.name}{behind}, row", start)

    def from_table(self, path: Path, start: int, stop: int | None) -> Iterator[Found]:
        """The rows of a CSV or TSV file, which is always read as a whole."""
        needed = {} if self.several else self.columns
        return self.contents(separated_rows(path, needed, self.settings.encoding), f"{path.name}, row")

    def contents(self, records: Iterable[Record | InvalidRecord], place: str, start: int = 0) -> Iterator[Found]:
        """The texts of records, and in their places the invalid ones: damaged, without the field, or of another type.

        Args:
            place: what is before the number of a record in messages.
            start: where they begin in the file or data set.

        Raises:
            SettingError: none of the records, or of the first thousand, has the field, so the setting is to blame. Of
                one file among several, or a range inside of one, this is not sure: `Invalid.require_fields` looks at
                all of them.
        """
        wrong: SettingError | None = None
        # Until the first fine record shows that the setting is right.
        waiting: list[InvalidRecord] | None = None if self.several or start else []
        for number, record in enumerate(records, 1 + (start if self.settings.path is None else 0)):
            if isinstance(record, InvalidRecord):
                yield record
                continue
            try:
                content = self.content(record, place.partition(",")[0])
            except SettingError as error:
                wrong = wrong or error
                bad = InvalidRecord(f"{place} {number:,}", str(error), True)
                if waiting is None:
                    yield bad
                    continue
                waiting.append(bad)
                if len(waiting) == MAX_WRONG:
                    raise wrong from None
                continue
            yield from waiting or ()
            waiting = None
            yield content
        if waiting and wrong is not None:
            raise wrong

    @property
    def fraction(self) -> float:  # type: ignore[override]
        return self.settings.fraction

    @classmethod
    def _usual_path(cls, split: str) -> Path | None:
        if (data := data_folder()) is None:
            return None
        return next((path for path in cls.usual_paths(data, split) if path.exists()), None)

    @cached_property
    def several(self) -> bool:
        """Whether it has several files, so that one without the field proves nothing about the others."""
        return len(self.files) > 1

    @cached_property
    def files(self) -> list[Path]:
        """The files behind `path` (a file, a folder with all below it, or a glob, also at a URL), sorted by name.

        Raises:
            SettingError: there are none.
        """
        if self.settings.path is None:
            return []
        if not (files := find_files(self.settings.path, f"{self.setting}.path", self.below)):
            names = ", ".join(f"*{suffix}" for suffix in self.suffixes)
            split = f" and split {self.settings.split}" if self.by_split else ""
            cure = f", {self.setting}.split" if self.by_split else ""
            raise SettingError(
                f"{self.setting}.path={self.settings.path}: no file of kind {self.settings.kind}{split} in this folder "
                f"({names}); give another folder{cure} or {self.setting}.kind"
            )
        if self.text_only and (other := [path for path in files if plain_name(path.name).endswith(NO_TEXT)]):
            raise SettingError(
                f"{self.setting}.path={self.settings.path}: {other[0].name} is by its name no plain text, and its "
                "marks would be trained on: write the text of it into a .txt, .jsonl, .csv or .parquet file"
            )
        return files

    def __getstate__(self) -> dict[str, Any]:
        """Other processes get the shards they are to read, not the list of all files."""
        return {name: value for name, value in self.__dict__.items() if name != "files"} | {"several": self.several}

    def describe(self) -> str:
        """For example `146 Gutenberg files in PATH`."""
        settings = self.settings
        more = (f", {settings.fraction:.3g} of its documents" if settings.fraction < 1 else "") + self.counted
        if settings.path is None:
            subset = f"{settings.subset}, " if settings.subset else ""
            return f"Hub data set {settings.hub} ({subset}split {settings.split}){more}"
        count = len(self.files)
        single = f"{self.word} file {settings.path}"
        return (single if count == 1 else f"{count:,} {self.word} files in {settings.path}") + more

    @property
    def text_files(self) -> list[Path]:
        if self.settings.path is not None or self.settings.hub is None:
            return self.files
        return [] if self.settings.streaming else [Path(file["filename"]) for file in self._hub_rows().cache_files]

    @property
    def identity(self) -> Any:
        """The settings that decide which text the files give.

        A streamed Hub data set is identified by its revision, or by its name alone where the Hub cannot be reached.
        """
        settings = self.settings
        hub = None if settings.hub is not None and readers.is_saved(settings.hub) else settings.hub  # a folder's path
        how: list[Any] = [settings.kind, self.field, hub, settings.subset, settings.split, settings.fraction]
        if settings.document is not None:
            how.append(settings.document.value)
        if settings.encoding is not None:
            how.append(settings.encoding)
        if self.prompts:
            how += self.written
        if settings.path is None and settings.hub is not None and settings.streaming:
            how.append(("stream", readers.hub_revision(settings.hub)))
        return how

    def shards(self) -> list[Shard]:
        if self.settings.path is None:
            return self._hub_shards()
        shards: list[Shard] = []
        group: list[str] = []
        size = 0
        sizes = [size_of(path) for path in self.files]
        large = [path for path, bytes_ in zip(self.files, sizes, strict=True) if bytes_ > SHARD_BYTES]
        ranges_of = dict(zip(large, for_each(lambda path: self._ranges(path, size_of(path)), large), strict=True))
        for path, bytes_ in zip(self.files, sizes, strict=True):
            if size and size + bytes_ > SHARD_BYTES:
                shards.append(Shard(tuple(group), size=size))
                group, size = [], 0
            if ranges := ranges_of.get(path):
                shards += ranges
            else:
                group.append(str(path))
                size += bytes_
        # 0 stands for a size that is not known; that of empty files is known.
        size = size or int(not any(map(is_url, group)))
        return [*shards, Shard(tuple(group), size=size)] if group else shards

    def _ranges(self, path: Path, size: int) -> list[Shard]:
        """Ranges of about RANGE_BYTES of a file that can be entered in the middle; none where it cannot."""
        if is_parquet(path):
            count = readers.num_row_groups(path)
            step = max(1, count * RANGE_BYTES // size)
            cuts = [*range(0, count, step), count]
            return [Shard((str(path),), a, b, size * (b - a) // count) for a, b in pairwise(cuts)]
        if not self.ranges or is_table(path) or compression_of(path) is not None:
            return []
        cuts = [*range(0, size, RANGE_BYTES), size]
        return [Shard((str(path),), a, b, b - a) for a, b in pairwise(cuts)]

    def _hub_shards(self) -> list[Shard]:
        if self.settings.streaming:
            return [Shard(())]
        rows = len(self._hub_rows())
        cuts = [*range(0, rows, SHARD_ROWS), rows]
        return [Shard((), a, b, b - a) for a, b in pairwise(cuts)]

    def documents(self, shard: Shard) -> Iterator[Document | InvalidRecord | LeftOut]:
        if not shard.paths:
            for number, content in enumerate(self._from_hub(shard)):
                yield from self._documents(f"{self.settings.hub}#{number}", content)
            return
        for name in shard.paths:
            path, empty = path_of(name, f"{self.setting}.path"), True
            for document_name, content in self.named(path, shard.start, shard.stop):
                for document in self._documents(document_name, content):
                    empty = empty and isinstance(document, LeftOut)
                    yield document
            if empty and shard.stop is None:
                raise InvalidFile(path.name, self.nothing)

    def _documents(self, name: str, content: Found) -> Iterator[Document | InvalidRecord | LeftOut]:
        """The document of a content; none of a text of blanks alone."""
        if isinstance(content, InvalidRecord | LeftOut):
            yield content
        elif isinstance(content, str):
            yield from [Document(name, content)] if content.strip() else []
        elif isinstance(content, Document):
            yield content._replace(name=name)
        else:
            yield Document.of_parts(name, content) if content else LeftOut(name, self.nothing)

    def _from_file(self, path: Path, start: int, stop: int | None) -> Iterator[Found]:
        """Parquet, JSONL, CSV and TSV files are read as such, whatever the kind."""
        if is_parquet(path):
            return self.from_parquet(path, start, stop)
        if is_jsonl(path):
            return self.from_jsonl(path, start, stop)
        if is_table(path):
            return self.from_table(path, start, stop)
        return self.read(path, start, stop)

    def _from_hub(self, shard: Shard) -> Iterator[Found]:
        rows = self._hub_rows()
        if self.settings.streaming:
            rows = readers.streamed_rows(rows, f"{self.setting}.hub={self.settings.hub}")
        else:
            rows = readers.sound_rows(rows, shard.start, len(rows) if shard.stop is None else shard.stop)
        return self.contents(map(self.of_columns, rows), f"{self.settings.hub}, row", shard.start)

    def _hub_rows(self) -> Any:
        settings = self.settings
        assert settings.hub is not None
        return readers.load_hub(settings.hub, settings.subset, settings.split, settings.streaming, self.setting)
