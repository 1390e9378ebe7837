"""JSON Lines, plain or gzipped; a field of every object is the text, another one may be a prompt before it."""

from distill.data.sources._files import FileSource


class Jsonl(FileSource):
    word = "JSONL"
    suffixes = (".jsonl", ".jsonl.gz")
    by_split = True
    takes = ("prompt", "encoding")
    read = FileSource.from_jsonl
