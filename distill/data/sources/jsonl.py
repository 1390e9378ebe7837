"""JSON Lines, plain or compressed; a field of every object is the text, another one may be a prompt before it."""

from distill.data.sources._files import FileSource


class Jsonl(FileSource):
    word = "JSONL"
    suffixes = (".jsonl",)
    format = "jsonl"
    by_split = True
    takes = ("prompt", "encoding")
