"""Plain text files; a blank line ends a paragraph."""

from collections.abc import Iterator
from pathlib import Path

from distill.data import readers
from distill.data.sources._files import FileSource


class Text(FileSource):
    word = "text"
    suffixes = (".txt", ".txt.gz")

    def read(self, path: Path, start: int, stop: int | None) -> Iterator[str]:
        return readers.pieces(path, start, stop)
