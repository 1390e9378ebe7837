"""Labelled texts as sequences: one text or two, cut to fit, with a class or a value for each sequence.

Shapes: N sequences, S positions.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self

import numpy as np

from distill.data.tables import LabelledTexts
from distill.data.text_pairs import TextEncoder, digest_of, stacked
from distill.runtime.errors import SettingError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class ClassSequences:
    """N sequences."""

    sequences: np.ndarray  # [N, S] uint16 or uint32: [CLS] text [SEP] or [CLS] text [SEP] text [SEP], then padding
    segments: np.ndarray  # [N, S] uint8: 1 from the second text's first token to the last [SEP], else 0
    labels: np.ndarray  # [L] int64 numbers of classes, or float64 values, of the first L sequences alone
    pad_id: int
    cut: int  # sequences whose texts did not fit
    digest: str  # sha256 of all that decides training and scores

    def __len__(self) -> int:
        return len(self.sequences)

    def with_unlabelled(self, others: Self) -> Self:
        """And behind them those of texts without labels."""
        sequences, segments = stacked((self.sequences, self.segments), (others.sequences, others.segments))
        digest = digest_of(sequences, segments, self.labels)
        return replace(self, sequences=sequences, segments=segments, cut=self.cut + others.cut, digest=digest)


def class_sequences(
    texts: LabelledTexts, tokenizer: "PreTrainedTokenizerBase", max_length: int, setting: str
) -> ClassSequences:
    """A sequence for every text or pair of texts, in their order.

    Args:
        max_length: ids of a sequence; what does not fit is cut off the end of the longer text.
        setting: which names it, for error lines.

    Raises:
        SettingError: sequences are too short, or the tokenizer lacks a special token.
    """
    encoder = TextEncoder(tokenizer)
    around = encoder.surroundings(pairs=texts.second is not None)
    room = max_length - around.count
    if room < 1 + (texts.second is not None):
        raise SettingError(f"{setting}={max_length}: no room for text; set 128 or so")
    shape = (len(texts), max_length)
    sequences, segments = np.full(shape, encoder.pad_id, encoder.dtype), np.zeros(shape, np.uint8)
    cut = 0
    others = texts.second if texts.second is not None else [""] * len(texts)
    for number, (one, other) in enumerate(zip(encoder.encode(texts.first), encoder.encode(others), strict=True)):
        first, second = fitting(len(one), len(other), room)
        cut += first + second < len(one) + len(other)
        row = [*around.before, *one.ids[:first], *around.between, *other.ids[:second], *around.after]
        sequences[number, : len(row)] = row
        if texts.second is not None:
            segments[number, len(around.before) + first + len(around.between) : len(row)] = 1
    digest = digest_of(sequences, segments, texts.labels)
    return ClassSequences(sequences, segments, texts.labels, encoder.pad_id, cut, digest)


def fitting(first: int, second: int, room: int) -> tuple[int, int]:
    """The lengths of two texts when tokens are taken off the longer one, of equal ones the second, until both fit."""
    if first + second <= room:
        return first, second
    if second <= room // 2:
        return room - second, second
    if first <= (room + 1) // 2:
        return first, room - first
    return (room + 1) // 2, room // 2
