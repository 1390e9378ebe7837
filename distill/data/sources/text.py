"""Plain text files; a blank line ends a paragraph."""

from collections.abc import Iterator
from pathlib import Path

from distill.config import DocumentUnit
from distill.data import readers
from distill.data.sources import Shard
from distill.data.sources._files import FileSource


class Text(FileSource):
    """What one document is can be said as `document`; else a file is read in texts of about 1 MiB."""

    word = "text"
    suffixes = (".txt", ".txt.gz")
    takes = ("document",)

    def read(self, path: Path, start: int, stop: int | None) -> Iterator[str]:
        match self.settings.document:
            case DocumentUnit.line:
                return (line.strip() for line in readers.lines(path, start, stop) if line.strip())
            case DocumentUnit.blank:
                return readers.paragraphs(path, start, stop)
            case DocumentUnit.file:
                return iter(["".join(readers.lines(path, start, stop)).strip()])
        return readers.pieces(path, start, stop)

    def _ranges(self, path: Path, size: int) -> list[Shard]:
        whole = self.settings.document is DocumentUnit.file
        return [] if whole and path.suffix != ".parquet" else super()._ranges(path, size)
