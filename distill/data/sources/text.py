"""Plain text files; a blank line ends a paragraph."""

from collections.abc import Iterator
from pathlib import Path

from distill.config.settings import DocumentUnit
from distill.data import readers
from distill.data.find_files import SPLITS, files_below, has_split
from distill.data.lines import InvalidRecord, sound_lines
from distill.data.sources import Shard
from distill.data.sources._files import FileSource, is_parquet


class Text(FileSource):
    """`document` defines what one document is; else a file is read in texts of about 1 MiB."""

    word = "text"
    suffixes = (".txt", ".txt.gz")
    takes = ("document", "encoding")
    by_split = True
    by_lines = True
    text_only = True

    def below(self, root: Path) -> list[Path]:
        """Those of the split only beside a file that is called like one: books may be called `test-pilot.txt`."""
        files, split = files_below(root, self.suffixes), self.settings.split
        splits = [split] if split == "train" else [split, *SPLITS]
        return self.of_split(files, root) if any(has_split(files, name) for name in splits) else files

    def read(self, path: Path, start: int, stop: int | None) -> Iterator[str | InvalidRecord]:
        encoding = self.settings.encoding
        match self.settings.document:
            case DocumentUnit.line:
                lines = sound_lines(path, start, stop, encoding=encoding)
                return (line if isinstance(line, InvalidRecord) else line.removesuffix("\n") for line in lines)
            case DocumentUnit.blank:
                return readers.paragraphs(path, start, stop, encoding)
            case DocumentUnit.file:
                return readers.whole(path, encoding)
        return readers.pieces(path, start, stop, encoding)

    def _ranges(self, path: Path, size: int) -> list[Shard]:
        is_whole_file = self.settings.document is DocumentUnit.file
        return [] if is_whole_file and not is_parquet(path) else super()._ranges(path, size)
