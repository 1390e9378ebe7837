"""IMDB reviews: `train.jsonl.gz`, or the original folders `aclImdb/train/{pos,neg}`."""

import re
from collections.abc import Iterator

from distill.data.find_files import File
from distill.data.readers import whole
from distill.data.sources._files import FileSource, format_of

_BREAK = re.compile(r"\s*(?:<br\s*/?>\s*)+", re.I)
_C1 = {code: bytes([code]).decode("cp1252", errors="ignore") for code in range(0x80, 0xA0)}


class Imdb(FileSource):
    word = "IMDB"
    suffixes = (".txt", ".jsonl")
    takes = ("encoding",)
    by_split = True
    usual = ("imdb/{split}.jsonl.gz", "imdb/aclImdb/{split}", "aclImdb/{split}")
    hub_names = ("stanfordnlp/imdb", "imdb")

    def chosen(self, files: list[File]) -> list[File]:
        """The reviews of the original folders: `unsup` and the word lists beside them stay out."""
        split = f"{self.settings.split}/"
        if any(file.below.startswith(split) for file in files):
            files = [
                file._replace(below=file.below.removeprefix(split)) for file in files if file.below.startswith(split)
            ]
        reviews = [file for file in files if file.below.startswith(("pos/", "neg/")) and file.name.endswith(".txt")]
        return reviews or self.of_split([file for file in files if format_of(file.place) == "jsonl"])

    def read(self, place: str, start: int, stop: int | None) -> Iterator[str]:
        """The one review of a file of the original folders."""
        yield review(whole(place, self.settings.encoding))

    def clean(self, text: str) -> str:
        return review(text)


def review(text: str) -> str:
    """An IMDB review with `<br />` as paragraph ends and C1 control characters as the Windows-1252 signs they were."""
    return _BREAK.sub("\n\n", text.translate(_C1)).strip()
