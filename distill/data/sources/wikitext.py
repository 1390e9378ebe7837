"""WikiText: articles under ` = Title = `, tokens joined back from `@-@ @,@ @.@`."""

import re
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from distill.data.lines import InvalidRecord, Record, sound_lines
from distill.data.readers import PIECE
from distill.data.sources._files import FileSource, Found

_FILES = {"train": "train.txt", "validation": "valid.txt", "test": "test.txt"}
_HEADING = re.compile(r"\s*((?:= )+)(.*?)((?: =)+)\s*$")
_MARK = re.compile(r" ?@([-,.])@ ?")


class Wikitext(FileSource):
    word = "WikiText"
    suffixes = (".txt", ".txt.gz", ".raw", ".tokens")
    by_split = True
    takes = ("encoding",)
    hub_names = ("Salesforce/wikitext", "wikitext")
    hub_subsets = ("wikitext-2-raw-v1",)
    by_lines = True

    @classmethod
    def usual_paths(cls, data: Path, split: str) -> list[Path]:
        return [data / "wikitext-2-raw" / _FILES.get(split, split)]

    def read(self, path: Path, start: int, stop: int | None) -> Iterator[str | InvalidRecord]:
        """The articles; one that crosses `stop` is cut there."""
        return _sound_articles(sound_lines(path, start, stop, encoding=self.settings.encoding))

    def contents(self, records: Iterable[Record | InvalidRecord], place: str, start: int = 0) -> Iterator[Found]:
        """The articles in the records of a file or data set, of which each is a line, or lines of its own."""
        return _sound_articles(chain.from_iterable(map(_lines, super().contents(records, place, start))))


def _lines(content: Any) -> list[str | InvalidRecord]:
    """The lines of a record; where it has several, it is no part of what is before and after it."""
    return ["", *content.split("\n"), ""] if isinstance(content, str) and "\n" in content.strip() else [content]


def _sound_articles(lines: Iterable[str | InvalidRecord]) -> Iterator[str | InvalidRecord]:
    """The articles in those lines that are sound; the others are before the article that ends after them."""
    bad: list[InvalidRecord] = []

    def sound() -> Iterator[str]:
        for line in lines:
            if isinstance(line, InvalidRecord):
                bad.append(line)
            else:
                yield line

    for article in articles(sound()):
        yield from bad
        bad.clear()
        yield article
    yield from bad


def articles(lines: Iterable[str]) -> Iterator[str]:
    """WikiText articles: split at ` = Title = `, headings without their marks, `@-@ @,@ @.@` joined back.

    Only a line between blank ones is a title, since formulas wrapped over lines can look like one. Where no title
    comes, an article ends after 1 MiB.
    """
    article: list[str] = []
    size = 0
    for before, line, after in _neighbours(lines):
        heading = _HEADING.match(line)
        if heading and len(heading[1]) == len(heading[3]) and not before.strip() and not after.strip():
            line = heading[2]
            ends = len(heading[1]) == 2  # one mark on either side: the title of the next article
        else:
            ends = size >= PIECE
        if ends and article:
            yield "\n\n".join(article)
            article, size = [], 0
        if line.strip():
            article.append(_MARK.sub(r"\1", line.strip()))
            size += len(line)
    yield "\n\n".join(article)


def _neighbours(lines: Iterable[str]) -> Iterator[tuple[str, str, str]]:
    """Each line with the one before and the one after it, empty at the ends."""
    before, line = "", None
    for after in lines:
        if line is not None:
            yield before, line, after
            before = line
        line = after
    if line is not None:
        yield before, line, ""
