"""Which part of the text training never sees, decided by the text alone."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice

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

    share: float  # the name is part of the key of a cache
    by_block: bool = False

    def parts(self, document: Document) -> Iterator[tuple[bool, Document]]:
        """(held out?, stretch) for each stretch of a document that falls to one part; they follow each other."""
        if not self.by_block or document.is_whole:
            yield self._below(document.key.strip()), document
            return
        stretch: list[str] = []
        is_held_out = False
        for block in blocks(document.text, BLOCK):
            falls_out = self._below(block.strip() if block == document.text else block)
            if stretch and falls_out != is_held_out:
                yield is_held_out, Document(document.name, "".join(stretch))
                stretch = []
            is_held_out = falls_out
            stretch.append(block)
        if stretch:
            yield is_held_out, Document(document.name, "".join(stretch))

    def _below(self, text: str) -> bool:
        return self.share > 0 and fraction(text, "heldout") < self.share


def held_out(share: float, documents: Iterable[Document], of_corpus: float = 1.0) -> HeldOut:
    """The rule for a corpus of these documents, of which at most the first 1,000 are looked at.

    Where they are 50 or more, and none of them would be held out by chance, it works on blocks too.

    Args:
        of_corpus: about which fraction of the corpus they are; that many more of their kind are taken to be in it.
    """
    by_document = HeldOut(share)
    if not share:
        return by_document
    drawn, count, holds_one = list[float](), 0, False
    for count, document in enumerate(islice(documents, MANY), 1):
        drawn += [fraction(block, "heldout") for block in _blocks(document)]
        holds_one = holds_one or fraction(document.key.strip(), "heldout") < share
        if count >= FEW and holds_one:
            return by_document
    if not drawn or count == MANY or (of_corpus < 1 and count / of_corpus >= FEW):
        return by_document
    drawn.sort()
    blocks_out = min(max(1, round(share * len(drawn))), len(drawn) - 1)
    # Strictly below: exactly so many, but for repeated text, of which all copies fall to one part.
    return HeldOut(next((bound for bound in drawn[blocks_out:] if bound > drawn[0]), drawn[0]), by_block=True)


def _blocks(document: Document) -> Iterator[str]:
    """What of a document is held out or not as a whole."""
    if document.is_whole:
        return iter([document.key.strip()])
    return (block.strip() if block == document.text else block for block in blocks(document.text, BLOCK))
