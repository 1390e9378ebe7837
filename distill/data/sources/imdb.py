"""IMDB reviews: `train.jsonl.gz`, or the original folders `aclImdb/train/{pos,neg}`."""

import re
from collections.abc import Iterator
from pathlib import Path

from distill.data.find_files import files_below
from distill.data.lines import InvalidRecord
from distill.data.readers import whole
from distill.data.sources._files import FileSource

_BREAK = re.compile(r"\s*(?:<br\s*/?>\s*)+", re.I)
_C1 = {code: bytes([code]).decode("cp1252", errors="ignore") for code in range(0x80, 0xA0)}


class Imdb(FileSource):
    word = "IMDB"
    suffixes = (".txt", ".jsonl", ".jsonl.gz")
    takes = ("encoding",)
    by_split = True
    hub_names = ("stanfordnlp/imdb", "imdb")

    @classmethod
    def usual_paths(cls, data: Path, split: str) -> list[Path]:
        return [data / "imdb" / f"{split}.jsonl.gz", data / "imdb" / "aclImdb" / split, data / "aclImdb" / split]

    def below(self, root: Path) -> list[Path]:
        split = self.settings.split
        if (root / split).is_dir():
            root = root / split
        if (root / "pos").is_dir() or (root / "neg").is_dir():  # `unsup` and the word lists beside them stay out
            return [path for name in ("pos", "neg") for path in files_below(root / name, (".txt",))]
        return self.of_split(files_below(root, (".jsonl", ".jsonl.gz")), root)

    def read(self, path: Path, start: int, stop: int | None) -> Iterator[str | InvalidRecord]:
        """The one review of a file of the original folders."""
        for text in whole(path, self.settings.encoding):
            yield text if isinstance(text, InvalidRecord) else review(text)

    def clean(self, text: str) -> str:
        return review(text)


def review(text: str) -> str:
    """An IMDB review with `<br />` as paragraph ends and C1 control characters as the Windows-1252 signs they were."""
    return _BREAK.sub("\n\n", text.translate(_C1)).strip()
