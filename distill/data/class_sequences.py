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
        max_length: ids of a sequence; what does not fit is cut off the longer text, as the tokenizer does it.
        setting: which names it, for error lines.

    Raises:
        SettingError: sequences are too short, or the tokenizer lacks a special token.
    """
    encoder, is_pair = TextEncoder(tokenizer), texts.second is not None
    around = encoder.surroundings(pairs=is_pair)
    if max_length < around.count + 1 + is_pair:
        raise SettingError(f"{setting}={max_length}: no room for text; set 128 or so")
    encoder.tokenizer.enable_truncation(max_length, strategy="longest_first")
    shape = (len(texts), max_length)
    sequences, segments = np.full(shape, encoder.pad_id, encoder.dtype), np.zeros(shape, np.uint8)
    cut = 0
    for number, encoding in enumerate(encoder.encode(texts.texts if is_pair else texts.first, special=True)):
        length = len(encoding)
        sequences[number, :length] = encoding.ids
        cut += bool(encoding.overflowing)
        if is_pair:
            segments[number, length - len(around.after) - encoding.sequence_ids.count(1) : length] = 1
    digest = digest_of(sequences, segments, texts.labels)
    return ClassSequences(sequences, segments, texts.labels, encoder.pad_id, cut, digest)
