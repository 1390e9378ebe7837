"""Parquet files; a column is the text, another one may be a prompt before it."""

from distill.data.sources._files import FileSource


class Parquet(FileSource):
    word = "Parquet"
    suffixes = (".parquet",)
    format = "parquet"
    by_split = True
    takes = ("prompt",)
