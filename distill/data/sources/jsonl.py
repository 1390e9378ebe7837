"""JSON Lines, plain or gzipped; a field of every object is the text."""

from collections.abc import Iterator
from pathlib import Path

from distill.data import readers
from distill.data.sources._files import FileSource


class Jsonl(FileSource):
    word = "JSONL"
    suffixes = (".jsonl", ".jsonl.gz")

    def read(self, path: Path, start: int, stop: int | None) -> Iterator[str]:
        return readers.records(path, self.settings.field, self.setting, start, stop)
