"""Plain text files; a blank line ends a paragraph."""

from collections.abc import Iterator

from distill.config.settings import DocumentUnit
from distill.data import readers
from distill.data.find_files import File
from distill.data.sources import Shard
from distill.data.sources._files import FileSource, format_of


class Text(FileSource):
    """`document` defines what one document is; else a file is read in texts of about 1 MiB."""

    word = "text"
    suffixes = (".txt",)
    takes = ("document", "encoding")
    by_split = True

    def chosen(self, files: list[File]) -> list[File]:
        return self.of_named_split(files)

    def read(self, place: str, start: int, stop: int | None) -> Iterator[str]:
        encoding = self.settings.encoding
        match self.settings.document:
            case DocumentUnit.line:
                return (line.removesuffix("\n") for _, line in readers.lines(place, start, stop, encoding))
            case DocumentUnit.blank:
                return readers.paragraphs(place, start, stop, encoding)
            case DocumentUnit.file:
                return iter([readers.whole(place, encoding)])
        return readers.pieces(place, start, stop, encoding)

    def _ranges(self, file: File) -> list[Shard]:
        is_whole_file = self.settings.document is DocumentUnit.file and not format_of(file.place)
        return [] if is_whole_file else super()._ranges(file)
