"""Which part of a text is turned into sequences where a run needs few of them: stretches from all over the text.

The choice depends on the text and on how many sequences are needed, up to a factor of two: never on processes or hosts.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from distill.data.document import Document
from distill.data.heldout import fraction
from distill.data.readers import blocks
from distill.data.work import Work, expected_tokens
from distill.runtime.seed import key, shuffled

SMALL = 1 << 20  # tokens; preparing as many takes a few seconds, so that nothing is gained by leaving some out
SPARE = 1.5  # sequences made for each one needed, as the sizes of files are a rough measure
SEQUENCES = 16  # that a stretch makes, about
CHARACTERS = 4  # of a token, about
LARGE = 1 << 30  # stored bytes up to which all files are read
FEWEST = 64  # units of work that are read of a larger text


@dataclass(frozen=True)
class PartOfText:
    """A fraction of all documents and, of those that are long, of their stretches of about `size` characters.

    The stretches of a smaller fraction are among those of a larger one.
    """

    share: float = 1.0  # the name is part of the key of a cache
    size: int = 8 << 10

    @property
    def whole(self) -> bool:
        return self.share >= 1

    def of(self, document: Document) -> Iterator[Document]:
        """What of a document is used, as documents of their own; one that `is_whole` is used as a whole or not."""
        if self.whole:
            yield document
            return
        if document.is_whole:
            yield from [document] if self._has(document.key) else []
            return
        stretch: list[str] = []
        for block in blocks(document.text, self.size):
            if self._has(block):
                stretch.append(block)
            elif stretch:
                yield document._replace(text="".join(stretch))
                stretch = []
        if stretch:
            yield document._replace(text="".join(stretch))

    def units(self, work: Sequence[Work]) -> "tuple[PartOfText, list[Work]]":
        """The units of work that are read, in order, and what is then used of each.

        They are all units unless the text takes more than a GiB: then four times as many as would do, and 64 at least.
        """
        count = max(FEWEST, int(np.ceil(4 * self.share * len(work))))
        if self.whole or count >= len(work) or sum(unit.shard.size for unit in work) <= LARGE:
            return self, list(work)
        chosen = np.sort(shuffled(np.arange(count), len(work), key(0, "units of work")))
        return PartOfText(min(1.0, self.share * len(work) / count), self.size), [work[number] for number in chosen]

    def _has(self, text: str) -> bool:
        return fraction(text, "rows") < self.share


def part_needed(sequences: int, sequence_length: int, work: Sequence[Work]) -> PartOfText:
    """What of these units of work is used for so many sequences of training.

    The fraction is a power of 1/2, so that runs that need about as many sequences share what others have prepared.
    """
    if not all(unit.shard.size for unit in work):  # the size is unknown
        return PartOfText()
    tokens = sum(unit.source.fraction * expected_tokens(unit.shard) for unit in work)
    fraction = 1.0
    while fraction * tokens >= 2 * SPARE * sequences * sequence_length and fraction * tokens >= 2 * SMALL:
        fraction /= 2
    return PartOfText(fraction, SEQUENCES * CHARACTERS * sequence_length)


def larger(part: PartOfText) -> PartOfText:
    """The part to try next, where one has given too few sequences."""
    return PartOfText(min(1.0, 4 * part.share), part.size)
