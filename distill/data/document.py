"""A document: a text or token ids under a name, and which of it is to be predicted where that is not all."""

from collections.abc import Iterable
from itertools import groupby
from typing import NamedTuple

import numpy as np


class Part(NamedTuple):
    """A segment of a document, such as its prompt or its answer."""

    text: str
    loss: bool = True  # whether its tokens are targets; those of a prompt are only read


class Document(NamedTuple):
    """A text, or token ids, with a name. L tokens.

    Attributes:
        name: for messages.
        text: its paragraphs are parted by blank lines; where there are `ids`, what they stand for, if that is known.
        parts: segments that together are `text`; none where all of its tokens are targets.
        ids: [L] the token ids, in place of those of `text`; without the end-of-text token behind them, or with it.
        loss_mask: [L] bool, which of `ids` are targets; None: all.
        add_bos: whether a beginning-of-text token is put before `ids`, where documents of the model have one.
    """

    name: str
    text: str
    parts: tuple[Part, ...] = ()
    ids: np.ndarray | None = None
    loss_mask: np.ndarray | None = None
    add_bos: bool = True

    @classmethod
    def of_parts(cls, name: str, parts: Iterable[Part]) -> "Document":
        """A document with prompts; neighbouring parts that are alike become one, as if they had been written so."""
        joined = tuple(
            Part("".join(part.text for part in alike), loss)
            for loss, alike in groupby((part for part in parts if part.text), key=lambda part: part.loss)
        )
        return cls(name, "".join(part.text for part in joined), joined)

    @property
    def is_whole(self) -> bool:
        """Whether it is never cut: an answer without its prompt would be another task."""
        return bool(self.parts) or self.ids is not None

    @property
    def key(self) -> str:
        """What decides whether it is held out, sampled or a duplicate: its text, else its ids as words."""
        return self.text if self.text or self.ids is None else " ".join(map(str, self.ids.tolist()))
