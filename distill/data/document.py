"""A document: a text under a name, and which stretches of it count where not all of it is to be predicted."""

from collections.abc import Iterable
from itertools import groupby
from typing import NamedTuple


class Part(NamedTuple):
    """A stretch of a document, such as its prompt or its answer."""

    text: str
    counts: bool = True  # whether its tokens are to be predicted; those of a prompt are only read
    special: bool = False  # whether the name of a special token in it, such as <|im_end|>, stands for that token
    rendered: bool = False  # by a chat template, which also writes how a document begins: tokenized with its neighbours


class Document(NamedTuple):
    """A text with a name.

    Attributes:
        name: for messages.
        text: its paragraphs are parted by blank lines.
        parts: stretches that together are `text`; none where all of it counts.
    """

    name: str
    text: str
    parts: tuple[Part, ...] = ()

    @classmethod
    def of_parts(cls, name: str, parts: Iterable[Part]) -> "Document":
        """A document with prompts; neighbouring parts that are alike become one, as if they had been written so."""
        joined = tuple(
            Part("".join(part.text for part in alike), *flags)
            for flags, alike in groupby((part for part in parts if part.text), key=lambda part: part[1:])
        )
        return cls(name, "".join(part.text for part in joined), joined)
