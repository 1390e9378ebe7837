"""CSV and TSV files, plain or gzipped; a column is the text, another one may be a prompt before it."""

from distill.data.separated import SUFFIXES
from distill.data.sources._files import FileSource


class Csv(FileSource):
    word = "CSV"
    suffixes = SUFFIXES
    by_split = True
    ranges = False
    takes = ("prompt", "encoding")
    read = FileSource.from_table
