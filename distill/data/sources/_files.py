"""What the sources of files and data sets have in common: where they lie, their shards, and reading one of them."""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, pairwise
from typing import Any, ClassVar, Self

from distill.config.settings import DataConfig, SourceConfig
from distill.data import readers
from distill.data.chat_template import holds_messages
from distill.data.find_files import (
    SPLITS,
    File,
    data_folder,
    file_name,
    find_files,
    has_split,
    plain_name,
    without_other_splits,
)
from distill.data.readers import Numbered, Record
from distill.data.sources import Document, LeftOut, Part, Shard, Source
from distill.runtime.errors import SettingError

logger = logging.getLogger(__name__)

SHARD_BYTES = 1 << 20  # smaller files are put together up to this size
RANGE_BYTES = 64 << 20  # larger plain files are read in ranges of this size, so that several processes can share one
SHARD_ROWS = 20_000  # rows of a data set in one shard

# Endings of files whose text stands between marks of a format that no kind reads.
NO_TEXT = (".json", ".xml", ".html", ".htm", ".pdf", ".doc", ".docx", ".odt", ".rtf", ".epub", ".xls", ".xlsx")

Content = str | tuple[Part, ...] | Document  # a text, its parts where there are prompts, or token ids
Found = Content | LeftOut  # in the place of a record


def format_of(place: str) -> str:
    """Whether a file holds records by its name, of whatever kind it is called: jsonl, parquet or csv; else nothing."""
    name = plain_name(place)
    if name.endswith(".parquet"):
        return "parquet"
    if ".jsonl" in name:
        return "jsonl"
    return "csv" if name.endswith((".csv", ".tsv")) else ""


@dataclass(frozen=True)
class FileSource(Source):
    """Files of one kind at `settings.path`, or a data set of the Hub.

    A kind defines which files are its own, where they usually are under $DISTILL_DATA, and how one is read.
    """

    settings: SourceConfig
    setting: str  # what error lines call the settings

    word: ClassVar[str]  # for the banner
    suffixes: ClassVar[tuple[str, ...]]  # of the files that are taken from a folder
    format: ClassVar[str] = ""  # how a file is read whose name does not tell: as `format_of` gives it; empty: as text
    by_split: ClassVar[bool] = False  # whether files of a folder that are called like another split are left out
    ranges: ClassVar[bool] = True  # whether a plain file can be entered in the middle
    takes: ClassVar[tuple[str, ...]] = ()  # which of the settings OPTIONAL it reads
    usual_field: ClassVar[str] = "text"
    usual: ClassVar[tuple[str, ...]] = ()  # where a split usually is below the folder $DISTILL_DATA
    hub_names: ClassVar[tuple[str, ...]] = ()  # data sets of which the usual paths hold copies
    hub_subsets: ClassVar[tuple[str, ...]] = ()  # the subsets of these that they hold; of other subsets none

    @classmethod
    def find(cls, settings: SourceConfig, setting: str, data: DataConfig) -> Self | None:
        """The source with its path filled in from $DISTILL_DATA where it has none; a Hub data set if it names one."""
        is_copy = settings.subset is None or not cls.hub_subsets or settings.subset in cls.hub_subsets
        copied = settings.hub is None or (settings.hub in cls.hub_names and is_copy)
        if settings.path is None and copied and (usual := cls._usual_path(settings.split)):
            settings = settings.changed(path=usual)
        if settings.path is not None and readers.is_saved(settings.path):
            settings = settings.changed(path=None, hub=settings.path, streaming=False)
        readers.check_encoding(settings.encoding, setting)
        source = cls(settings, setting)
        if settings.path is not None:
            _ = source.files  # refuses a path without any
            return source
        return source if settings.hub else None

    # What a kind may override.

    def chosen(self, files: list[File]) -> list[File]:
        """The files of the source, among those that end like its own."""
        return self.of_split(files) if self.by_split else files

    def of_split(self, files: list[File]) -> list[File]:
        """Those of the files of a folder that are not called like another split than that of the settings."""
        kept = without_other_splits(files, self.settings.split)
        if left_out := sorted({*files} - {*kept}):
            logger.info(
                f"{self.setting}.path={self.settings.path}: {len(left_out):,} files of other splits than "
                f"{self.settings.split} are left out, such as {left_out[0].place}"
            )
        return kept

    def of_named_split(self, files: list[File]) -> list[File]:
        """`of_split` beside a file or a folder that is called like one alone: books may be called `test-pilot.txt`."""
        split = self.settings.split
        splits = [split] if split == "train" else [split, *SPLITS]
        return self.of_split(files) if any(has_split(files, name) for name in splits) else files

    def read(self, place: str, start: int, stop: int | None) -> Iterator[Found]:
        """The texts of a plain file, or of the lines that begin in its bytes [start, stop)."""
        raise NotImplementedError

    def clean(self, text: str) -> str:
        """A text that came as a field of a record."""
        return text

    def content(self, record: Record, name: str) -> Content:
        """The text of a record of a file or data set of this name, after its prompt where it has one; may be empty."""
        for setting, field in (("field", self.field), ("prompt", self.settings.prompt)):
            if field is not None and holds_messages(record.get(field)):
                raise SettingError(
                    "it holds conversations, not text",
                    setting=f"{self.setting}.{setting}", value=field, cure=f"set {self.setting}.kind=chat",
                )  # fmt: skip
        text = self.clean(readers.text_in(record, self.field, f"{self.setting}.field"))
        if self.settings.prompt is None:
            return text
        prompt = readers.text_in(record, self.settings.prompt, f"{self.setting}.prompt")
        return (Part(prompt, loss=False), Part(text)) if text else ()

    def named(self, place: str, start: int, stop: int | None) -> Iterator[tuple[str, Found]]:
        """Name and content of everything in a file or a range of it."""
        form = format_of(place) or self.format
        found = self.contents(self._records(form, place, start, stop), place, start) if form else None
        for number, content in enumerate(self.read(place, start, stop) if found is None else found):
            yield f"{file_name(place)}#{number}", content

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
        """Why a record without a document is left out."""
        return "no text in it"

    def columns(self, names: list[str]) -> dict[str, str]:
        """The columns that it reads of a file with these, by the setting that names each."""
        columns = {f"{self.setting}.field": self.field}
        if self.settings.prompt is not None:
            columns[f"{self.setting}.prompt"] = self.settings.prompt
        return columns

    def of_columns(self, row: Record) -> Record:
        """A row of a Parquet file or a data set of `datasets` as the record that it stands for."""
        return row

    def _records(self, form: str, place: str, start: int, stop: int | None) -> Numbered:
        if form == "jsonl":
            return readers.records(place, start, stop, self.settings.encoding)
        if form == "csv":
            return readers.table_rows(place, self.columns, self.settings.encoding)
        rows = readers.parquet_rows(place, self.columns, start, stop)
        return ((number, self.of_columns(row)) for number, row in rows)

    def contents(self, records: Numbered, place: str, start: int = 0) -> Iterator[Found]:
        """The texts of the records in a file, from byte `start` on, or in a data set of this name.

        Raises:
            SettingError: a record has no text; with its place.
        """
        for number, record in records:
            try:
                yield self.content(record, place)
            except SettingError as error:
                raise self._at(place, start, number, error) from error

    def _at(self, place: str, start: int, number: int, error: SettingError) -> SettingError:
        """The same error with the line or the row at which it stands."""
        plain = self.settings.path is not None and (format_of(place) or self.format) != "parquet"
        where = readers.line_name(place, start, number) if plain else f"{file_name(place)}, row {number:,}"
        return readers.at(where, error)

    @property
    def fraction(self) -> float:  # type: ignore[override]
        return self.settings.fraction

    @classmethod
    def _usual_path(cls, split: str) -> str | None:
        if (data := data_folder()) is None:
            return None
        names = (name.format(split=split, short="valid" if split == "validation" else split) for name in cls.usual)
        return next((str(path) for name in names if (path := data / name).exists()), None)

    @cached_property
    def files(self) -> list[File]:
        """The files behind `path` (a file, a folder with all below it, or a glob, also at a URL), sorted by name.

        Raises:
            SettingError: there are none.
        """
        settings, setting = self.settings, self.setting
        if settings.path is None:
            return []
        files = find_files(settings.path, f"{setting}.path", self.suffixes)
        if not files or files[0].below:
            files = self.chosen(files)
        if not files:
            names = ", ".join(f"*{suffix}" for suffix in self.suffixes)
            split = f" and split {settings.split}" if self.by_split else ""
            cure = f", {setting}.split" if self.by_split else ""
            raise SettingError(
                f"no file of kind {settings.kind}{split} in this folder ({names})",
                setting=f"{setting}.path", value=settings.path, cure=f"give another folder{cure} or {setting}.kind",
            )  # fmt: skip
        other = next((file for file in files if plain_name(file.name).endswith(NO_TEXT)), None)
        if not self.format and other is not None:
            raise SettingError(
                f"{other.name} is by its name no plain text, and its marks would be trained on",
                setting=f"{setting}.path", value=settings.path,
                cure="write the text of it into a .txt, .jsonl, .csv or .parquet file",
            )  # fmt: skip
        return files

    def __getstate__(self) -> dict[str, Any]:
        """Other processes get the shards they are to read, not the list of all files."""
        return {name: value for name, value in self.__dict__.items() if name != "files"}

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
    def text_files(self) -> list[str]:
        if self.settings.path is not None:
            return [file.place for file in self.files]
        return [] if self.settings.streaming else [file["filename"] for file in self.data_set.cache_files]

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
        for file in self.files:
            if size and size + file.size > SHARD_BYTES:
                shards.append(Shard(tuple(group), size=size))
                group, size = [], 0
            if ranges := self._ranges(file) if file.size > SHARD_BYTES else []:
                shards += ranges
            else:
                group.append(file.place)
                size += file.size
        # 0 stands for a size that is not known; that of empty files is known.
        size = size or int(not any("://" in place for place in group))
        return [*shards, Shard(tuple(group), size=size)] if group else shards

    def _ranges(self, file: File) -> list[Shard]:
        """Ranges of about RANGE_BYTES of a file that can be entered in the middle; none where it cannot."""
        form = format_of(file.place) or self.format
        if form == "parquet":
            count = readers.num_row_groups(file.place)
            step = max(1, count * RANGE_BYTES // file.size)
            cuts = [*range(0, count, step), count]
            return [Shard((file.place,), a, b, file.size * (b - a) // count) for a, b in pairwise(cuts)]
        if not (self.ranges or form == "jsonl") or form == "csv" or readers.is_compressed(file.place):
            return []
        cuts = [*range(0, file.size, RANGE_BYTES), file.size]
        return [Shard((file.place,), a, b, b - a) for a, b in pairwise(cuts)]

    def documents(self, shard: Shard) -> Iterator[Document | LeftOut]:
        found = (self.named(place, shard.start, shard.stop) for place in shard.paths)
        for name, content in chain.from_iterable(found) if shard.paths else self._from_hub(shard):
            if isinstance(content, LeftOut):
                yield content
            elif isinstance(content, str):
                yield from [Document(name, content)] if content.strip() else []
            elif isinstance(content, Document):
                yield content._replace(name=name)
            else:
                yield Document.of_parts(name, content) if content else LeftOut(name, self.nothing)

    # Data sets of the Hub, on a disk, or in memory.

    @cached_property
    def data_set(self) -> Any:
        """The data set that `settings.hub` names, as `datasets` has it."""
        settings = self.settings
        assert settings.hub is not None
        return readers.load_hub(settings.hub, settings.subset, settings.split, settings.streaming, self.setting)

    def _hub_shards(self) -> list[Shard]:
        """Ranges of rows; of a streamed data set the files that it has, by their numbers."""
        if self.settings.streaming:
            return [Shard((), number, number + 1) for number in range(self.data_set.num_shards)]
        rows = len(self.data_set)
        cuts = [*range(0, rows, SHARD_ROWS), rows]
        return [Shard((), a, b, b - a) for a, b in pairwise(cuts)]

    def _from_hub(self, shard: Shard) -> Iterator[tuple[str, Found]]:
        name, rows, start = str(self.settings.hub), self.data_set, shard.start
        if self.settings.streaming:
            rows, start = rows.shard(rows.num_shards, shard.start), 0
        elif shard.stop is not None:
            rows = rows.select(range(shard.start, shard.stop))
        records = (
            (n, self.of_columns(row)) for n, row in readers.numbered_rows(rows, f"{self.setting}.hub={name}", start)
        )
        for number, content in enumerate(self.contents(records, name)):
            yield f"{name}#{number}", content
