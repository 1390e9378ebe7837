"""Which part of the text training never sees, decided by the text alone."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from itertools import groupby, islice

from distill.data.document import Document
from distill.data.readers import blocks

FEW, MANY = 50, 1000  # documents
BLOCK = 8 << 10  # characters


def fraction(text: str, purpose: str) -> float:
    """A number in [0, 1) drawn from the text alone: the same on every machine, another one for each purpose."""
    digest = blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8, person=purpose.encode()).digest()
    return int.from_bytes(digest, "big") / 2**64


@dataclass(frozen=True)
class HeldOut:
    """Which part of the text training never sees, decided by the text alone.

    A document is held out when its `fraction` is below `share`. Of fewer than 50 documents that could take none, or
    far too much, so there the rule works on blocks of whole paragraphs of about 8 KiB: the fraction of them with the
    lowest fractions is held out, at least one. A document with parts is one block: an answer without its prompt
    would be another task.
    """

    share: float
    by_block: bool = False

    def parts(self, document: Document) -> Iterator[tuple[bool, Document]]:
        """(held out?, segment) for each segment of a document that falls to one part; they follow each other."""
        if not self.by_block or document.is_whole:
            yield self._below(document.key.strip()), document
            return
        for is_held_out, alike in groupby(
            blocks(document.text, BLOCK), lambda block: self._below(_unit(block, document))
        ):
            yield is_held_out, Document(document.name, "".join(alike))

    def _below(self, text: str) -> bool:
        return self.share > 0 and fraction(text, "heldout") < self.share


def held_out(share: float, documents: Iterable[Document]) -> HeldOut:
    """The rule for a corpus of these documents, of which at most the first 1,000 are looked at.

    Where they are 50 or more, and none of them would be held out by chance, it works on blocks too.
    """
    if not share:
        return HeldOut(share)
    drawn, count, holds_one = list[float](), 0, False
    for count, document in enumerate(islice(documents, MANY), 1):
        pieces = [document.key] if document.is_whole else blocks(document.text, BLOCK)
        drawn += [fraction(_unit(piece, document), "heldout") for piece in pieces]
        holds_one = holds_one or fraction(document.key.strip(), "heldout") < share
        if count >= FEW and holds_one:
            return HeldOut(share)
    if not drawn or count == MANY:
        return HeldOut(share)
    drawn.sort()
    blocks_out = min(max(1, round(share * len(drawn))), len(drawn) - 1)
    # Strictly below: exactly so many, but for repeated text, of which all copies fall to one part.
    return HeldOut(next((bound for bound in drawn[blocks_out:] if bound > drawn[0]), drawn[0]), by_block=True)


def _unit(block: str, document: Document) -> str:
    """The text by which a block is held out: a document that is one block is known without the blanks at its ends."""
    return block.strip() if block == document.key else block
