"""Sequences of two consecutive segments of one document, as models that learn the order of sentences read them.

Segments are whole sentences. As in Lan et al., "ALBERT: A Lite BERT" (2020), sections 3.1 and 4.1, and in the code that
was published with it, sentences are collected up to the length of a sequence, or, for one sequence in ten, up to a
length drawn at random; a cut between two of them, drawn at random, parts the sequence in two. In that code a sequence
that has one sentence only is completed from another document, which is another task; here it takes the next sentence
too, and a lone one at the end of a document is left out.
"""

import re
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import IO

import numpy as np

from distill.data.heldout import fraction
from distill.data.sequence_format import SequenceFormat
from distill.runtime.seed import key, uniform

SHORT = 0.1  # fraction of the sequences whose length is drawn at random
SEED = 0  # sequences are the same in every run
# The blanks behind a full stop, question or exclamation mark (with closing quotes or brackets) and before a capital, a
# digit or an opening quote; and a blank line. East Asian full stops need no blank behind them.
_END = re.compile(
    r"(?<=[.!?\u2026])[\"'\u201d\u2019)\]]*(?=\s+[\"'\u201c\u2018(\[]*[^\W_a-z])|(?<=[\u3002\uff01\uff1f])|(?=\n\s*\n)"
)
# What is followed by a full stop in the middle of a sentence.
_ABBREVIATION = re.compile(r"(?:^|[\s(\"'\u201c])(?:[A-Z]|Mr|Mrs|Ms|Dr|St|Prof|Rev|Hon|Capt|Col|Gen|Lt|No|vol|pp?)\.$")

_TEXT = re.compile(r"\S")


class PairWriter:
    """Sequences `row_start` A `separator` B `row_end` written to a file, document by document.

    Attributes:
        sequences, tokens, documents: how many were written.
        dropped: tokens that are in no sequence.
    """

    def __init__(self, file: IO[bytes], format: SequenceFormat, length: int, dtype: np.dtype) -> None:
        """`length`: of a sequence, ids; `dtype`: of an id."""
        self.file, self.format, self.length, self.dtype = file, format, length, dtype
        self.sequences = self.tokens = self.documents = self.dropped = 0

    @property
    def room(self) -> int:
        """The most ids of text that fit into a sequence."""
        return self.length - self.format.body

    def add(self, text: str, sentences: Iterable[list[int]]) -> None:
        """Writes the sequences of a document: its text, which seeds what is drawn at random, and its sentences' ids."""
        document = int(fraction(text, "pairs") * 2**53)
        draws = self._draws(document)
        chunk: list[list[int]] = []
        target = self._target(draws[0], draws[1])
        for ids in self._not_too_long(sentences):
            chunk.append(ids)
            if len(chunk) > 1 and sum(map(len, chunk)) >= target:
                self._write(chunk, draws[2], document)
                chunk, draws = [], self._draws(document)
                target = self._target(draws[0], draws[1])
        if len(chunk) > 1 and sum(map(len, chunk)) >= self.format.shortest:
            self._write(chunk, draws[2], document)
        else:
            self.dropped += sum(map(len, chunk))

    def _draws(self, document: int) -> list[float]:
        """Three numbers between 0 and 1 for the next sequence, by its document and its number."""
        return [float(number) for number in uniform(key(SEED, "pairs", document, self.sequences, np.arange(3)))]

    def _target(self, short: float, length: float) -> int:
        """After how many ids a sequence is full."""
        least = self.format.shortest
        return least + int(length * (self.room - least)) if short < SHORT else self.room

    def _not_too_long(self, sentences: Iterable[list[int]]) -> Iterable[list[int]]:
        """Cuts sentences that would not leave room for a second one."""
        max_ids = max(1, self.room // 2)
        for ids in sentences:
            yield from (ids[start : start + max_ids] for start in range(0, len(ids), max_ids))

    def _write(self, chunk: list[list[int]], cut_fraction: float, document: int) -> None:
        """Writes one sequence; what does not fit is taken off the longer segment, at a random end, token by token.

        As in the published code: if segments always lost the same end, full stops would show which one came first.
        """
        cut = 1 + int(cut_fraction * (len(chunk) - 1))
        first, second = (list(chain.from_iterable(part)) for part in (chunk[:cut], chunk[cut:]))
        surplus = max(0, len(first) + len(second) - self.room)
        self.dropped += surplus
        # The longer one gives, as in the published code, until both are alike; then they take turns.
        from_second = min(surplus, max(0, (surplus + len(second) - len(first)) // 2))
        off = (
            uniform(key(SEED, "truncation", document, self.sequences, np.arange(surplus))) < 0.5
        )  # which lose the front
        first = _cut(first, off[: surplus - from_second])
        second = _cut(second, off[surplus - from_second :])
        format = self.format
        ids = [format.row_start, *first, format.separator, *second, format.row_end]
        row = np.full(self.length, format.pad, self.dtype)
        row[: len(ids)] = ids
        self.file.write(row.tobytes())
        self.sequences += 1
        self.tokens += len(ids)


def _cut(ids: list[int], from_front: np.ndarray) -> list[int]:
    """`ids` without as many as there are entries, one at its front for each that is true, else one at its back."""
    front = int(from_front.sum())
    return ids[front : len(ids) - (len(from_front) - front)]


def sentences(text: str) -> Iterator[str]:
    """Cuts a text by punctuation alone, so that no language model is needed to read a corpus.

    Gives stretches that put together are `text`, each but the first with the blanks before it; none is blank.
    """
    begin = 0
    for end in (match.end() for match in _END.finditer(text)):
        sentence = text[begin:end]
        if sentence.strip() and _TEXT.search(text, end) and not _ABBREVIATION.search(sentence[-8:]):
            yield sentence
            begin = end
    if text[begin:].strip():
        yield text[begin:]
