"""What the sources of files and Hub data sets share: where they lie, their shards, and reading one of them."""

import glob
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, Self

from distill.config import CacheConfig, SourceConfig
from distill.data import readers
from distill.data.readers import Unreadable
from distill.data.sources import Document, Shard, Source, file_state
from distill.errors import SettingError

SHARD_BYTES = 1 << 20  # smaller files are put together up to this size
RANGE_BYTES = 64 << 20  # larger plain files are read in ranges of this size, so that several processes can share one
HUB_ROWS = 20_000  # rows of a Hub data set in one shard


@dataclass(frozen=True)
class FileSource(Source):
    """Files of one kind at `settings.path`, or a data set of the Hub.

    A kind says which files are its own, where they usually lie under $DISTILL_DATA, and how one is read.
    """

    settings: SourceConfig
    setting: str  # what error lines call the settings

    word: ClassVar[str]  # for the banner
    suffixes: ClassVar[tuple[str, ...]]  # of the files that are taken from a folder
    ranges: ClassVar[bool] = True  # whether a plain file can be entered in the middle

    @classmethod
    def find(cls, settings: SourceConfig, setting: str, cache: CacheConfig) -> Self | None:
        """The source with its path filled in from $DISTILL_DATA where it has none; a Hub data set if it names one."""
        if settings.path is None and (usual := cls._usual_path(settings.split)):
            settings = replace(settings, path=str(usual))
        source = cls(settings, setting)
        if settings.path is not None:
            _ = source.files  # refuses a path without any
            return source
        return source if settings.hub else None

    # What a kind may override.

    @classmethod
    def usual_paths(cls, data: Path, split: str) -> list[Path]:
        """Where a split usually lies below the folder $DISTILL_DATA."""
        return []

    def below(self, root: Path) -> list[Path]:
        """The files of a folder that belong to the source."""
        return [path for path in root.rglob("*") if path.name.lower().endswith(self.suffixes) and path.is_file()]

    def read(self, path: Path, start: int, stop: int | None) -> Iterator[str]:
        """The texts of a file, or of the lines that begin in its bytes [start, stop)."""
        raise NotImplementedError

    def clean(self, text: str) -> str:
        """A text that came as a field of a record."""
        return text

    def from_rows(self, texts: Iterable[str]) -> Iterable[str]:
        """The documents in the rows of a Hub data set."""
        return (self.clean(text).strip() for text in texts)

    def named(self, path: Path, start: int, stop: int | None) -> Iterator[tuple[str, str]]:
        """Name and text of everything in a file or a range of it."""
        for number, text in enumerate(self._from_file(path, start, stop)):
            yield f"{path.name}#{number}", text

    # What all kinds have in common.

    @property
    def share(self) -> float:  # type: ignore[override]
        return self.settings.share

    @classmethod
    def _usual_path(cls, split: str) -> Path | None:
        root = os.environ.get("DISTILL_DATA")
        if not root:
            return None
        data = Path(root).expanduser()
        if not data.is_dir():
            raise SettingError(f"DISTILL_DATA={root}: there is no such folder; correct the variable or unset it")
        return next((path for path in cls.usual_paths(data, split) if path.exists()), None)

    @cached_property
    def files(self) -> list[Path]:
        """The files behind `path` (a file, a folder with all below it, or a glob), sorted by name; none of the Hub.

        Raises:
            SettingError: there are none.
        """
        if self.settings.path is None:
            return []
        path = Path(self.settings.path).expanduser()
        if path.is_file():
            return [path]
        if path.is_dir():
            if not (found := sorted(self.below(path))):
                names = ", ".join(f"*{suffix}" for suffix in self.suffixes)
                raise SettingError(
                    f"{self.setting}.path={self.settings.path}: no file of kind {self.settings.kind} in this folder "
                    f"({names}); give another folder or {self.setting}.kind"
                )
            return found
        found = sorted(Path(name) for name in glob.glob(str(path), recursive=True) if os.path.isfile(name))
        if not found:
            raise SettingError(f"{self.setting}.path={self.settings.path}: no such file or folder; correct the path")
        return found

    def __getstate__(self) -> dict[str, Any]:
        """Other processes get the shards they are to read, not the list of all files."""
        return {name: value for name, value in self.__dict__.items() if name != "files"}

    def describe(self) -> str:
        """For example `146 Gutenberg files in PATH`."""
        settings = self.settings
        share = f", {settings.share:.3g} of its documents" if settings.share < 1 else ""
        if settings.path is None:
            subset = f"{settings.subset}, " if settings.subset else ""
            return f"Hub data set {settings.hub} ({subset}split {settings.split}){share}"
        count = len(self.files)
        single = f"{self.word} file {settings.path}"
        return (single if count == 1 else f"{count:,} {self.word} files in {settings.path}") + share

    @property
    def identity(self) -> Any:
        """Names, sizes and times of the files, and the settings that decide which text they give.

        A streamed Hub data set is known by its revision, or by its name alone where the Hub cannot be reached.
        """
        settings = self.settings
        how = [settings.kind, settings.field, settings.hub, settings.subset, settings.split, settings.share]
        if settings.path is not None or settings.hub is None:
            return [[file_state(path) for path in self.files], *how]
        if settings.streaming:
            return [[("stream", readers.hub_revision(settings.hub))], *how]
        return [[file_state(Path(file["filename"])) for file in self._hub_rows().cache_files], *how]

    def shards(self) -> list[Shard]:
        if self.settings.path is None:
            return self._hub_shards()
        found: list[Shard] = []
        group: list[str] = []
        size = 0
        for path in self.files:
            bytes_ = path.stat().st_size
            if size and size + bytes_ > SHARD_BYTES:
                found.append(Shard(tuple(group), size=size))
                group, size = [], 0
            if bytes_ > SHARD_BYTES and (ranges := self._ranges(path, bytes_)):
                found += ranges
            else:
                group.append(str(path))
                size += bytes_
        return [*found, Shard(tuple(group), size=size)] if group else found

    def _ranges(self, path: Path, size: int) -> list[Shard]:
        """Ranges of about RANGE_BYTES of a file that can be entered in the middle; none where it cannot."""
        if path.suffix == ".parquet":
            count = readers.num_row_groups(path)
            step = max(1, count * RANGE_BYTES // size)
            cuts = [*range(0, count, step), count]
            return [Shard((str(path),), a, b, size * (b - a) // count) for a, b in pairwise(cuts)]
        if not self.ranges or path.suffix in (".gz", ".zip"):
            return []
        cuts = [*range(0, size, RANGE_BYTES), size]
        return [Shard((str(path),), a, b, b - a) for a, b in pairwise(cuts)]

    def _hub_shards(self) -> list[Shard]:
        if self.settings.streaming:
            return [Shard(())]
        rows = len(self._hub_rows())
        cuts = [*range(0, rows, HUB_ROWS), rows]
        return [Shard((), a, b, b - a) for a, b in pairwise(cuts)]

    def documents(self, shard: Shard) -> Iterator[Document]:
        if not shard.paths:
            texts = enumerate(self._from_hub(shard))
            yield from (Document(f"{self.settings.hub}#{number}", text) for number, text in texts if text)
            return
        for name in shard.paths:
            path, empty = Path(name), True
            for document in self.named(path, shard.start, shard.stop):
                if document[1]:
                    empty = False
                    yield Document(*document)
            if empty and shard.stop is None:
                raise Unreadable(path.name, "no text in it")

    def _from_file(self, path: Path, start: int, stop: int | None) -> Iterator[str]:
        """Parquet and JSONL files are read as such, whatever the kind."""
        field, setting = self.settings.field, self.setting
        if path.suffix == ".parquet":
            return map(self.clean, readers.columns(path, field, setting, start, stop))
        if ".jsonl" in path.suffixes:
            return map(self.clean, readers.records(path, field, setting, start, stop))
        return self.read(path, start, stop)

    def _from_hub(self, shard: Shard) -> Iterable[str]:
        assert self.settings.hub is not None
        rows = self._hub_rows()
        if not self.settings.streaming:
            rows = rows.select(range(shard.start, shard.stop or len(rows)))
        return self.from_rows(readers.hub_texts(rows, self.settings.field, self.settings.hub, self.setting))

    def _hub_rows(self) -> Any:
        settings = self.settings
        assert settings.hub is not None
        return readers.load_hub(settings.hub, settings.subset, settings.split, settings.streaming, self.setting)
