"""CSV and TSV files, plain or compressed; a column is the text, another one may be a prompt before it."""

from distill.data.sources._files import FileSource


class Csv(FileSource):
    word = "CSV"
    suffixes = (".csv", ".tsv")
    format = "csv"
    by_split = True
    takes = ("prompt", "encoding")
