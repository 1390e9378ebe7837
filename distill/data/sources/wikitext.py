"""WikiText: articles under ` = Title = `, tokens joined back from `@-@ @,@ @.@`."""

import re
from collections.abc import Iterable, Iterator
from itertools import chain, islice, tee

from distill.data.readers import PIECE, Numbered, lines
from distill.data.sources._files import FileSource, Found

_HEADING = re.compile(r"\s*((?:= )+)(.*?)((?: =)+)\s*$")
_MARK = re.compile(r" ?@([-,.])@ ?")


class Wikitext(FileSource):
    word = "WikiText"
    suffixes = (".txt", ".raw", ".tokens")
    by_split = True
    takes = ("encoding",)
    usual = ("wikitext-2-raw/{short}.txt",)
    hub_names = ("Salesforce/wikitext", "wikitext")
    hub_subsets = ("wikitext-2-raw-v1",)

    def read(self, place: str, start: int, stop: int | None) -> Iterator[str]:
        """The articles; one that crosses `stop` is cut there."""
        return articles(line for _, line in lines(place, start, stop, self.settings.encoding))

    def contents(self, records: Numbered, place: str, start: int = 0) -> Iterator[Found]:
        """The articles in the records of a file or data set, of which each is a line, or lines of its own."""
        return articles(chain.from_iterable(map(_lines, super().contents(records, place, start))))


def _lines(content: Found) -> list[str]:
    """The lines of a record; where it has several, it is no part of what is before and after it."""
    text = str(content)
    return ["", *text.split("\n"), ""] if "\n" in text.strip() else [text]


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
    before, here, after = tee(chain([""], lines, [""]), 3)
    return zip(before, islice(here, 1, None), islice(after, 2, None), strict=False)
