"""Parquet files; a column is the text."""

from collections.abc import Iterator
from pathlib import Path

from distill.data import readers
from distill.data.sources._files import FileSource


class Parquet(FileSource):
    word = "Parquet"
    suffixes = (".parquet",)
    ranges = False

    def read(self, path: Path, start: int, stop: int | None) -> Iterator[str]:
        return readers.columns(path, self.settings.field, self.setting, start, stop)
