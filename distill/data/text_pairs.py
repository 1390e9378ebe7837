"""Texts and pairs of texts as sequences, cut to fit as the tokenizer does it, with a class or a value for each.

Shapes: N sequences, S positions.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from distill.data.sequence_format import masked_format, padding_of
from distill.data.tables import LabelledTexts
from distill.runtime.errors import SettingError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

AT_ONCE = 1000  # texts that are tokenized together


@dataclass(frozen=True)
class Surroundings:
    """Special tokens of a sequence: `before` first `between` second `after`, or `before` text `after`."""

    before: tuple[int, ...]
    between: tuple[int, ...]  # none in a sequence of one text
    after: tuple[int, ...]

    @property
    def count(self) -> int:
        return len(self.before) + len(self.between) + len(self.after)


class TextEncoder:
    """Tokenizes texts with a copy of a tokenizer; a special token's name in a text is text.

    Attributes:
        pad_id: what fills up sequences.
        dtype: of sequences: uint16 where the ids allow it, else uint32.
        tokenizer: the copy, which puts [CLS] and [SEP] around one text and two where an encoder's has no rule.

    Raises:
        SettingError: the tokenizer lacks a token that sequences need.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        from tokenizers import Tokenizer
        from tokenizers.processors import TemplateProcessing

        # The tokenizer of a decoder has a rule of its own, or none, and often no token for padding.
        is_decoders = tokenizer.mask_token_id is None and tokenizer.cls_token_id is None
        pad = padding_of(tokenizer) if is_decoders else None
        self.pad_id = masked_format(tokenizer).pad if pad is None else pad
        self.dtype = np.dtype(np.uint16 if max(len(tokenizer), self.pad_id + 1) <= 1 << 16 else np.uint32)
        self.tokenizer = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        self.tokenizer.no_padding()
        self.tokenizer.no_truncation()
        self.tokenizer.encode_special_tokens = True
        if pad is None and not all(self.surroundings(pairs).before for pairs in (False, True)):
            usual = masked_format(tokenizer)
            (cls, sep), ids = ("[first]", "[last]"), (usual.row_start, usual.row_end)
            self.tokenizer.post_processor = TemplateProcessing(
                single=f"{cls} $A {sep}",
                pair=f"{cls} $A {sep} $B {sep}",
                special_tokens=[*zip((cls, sep), ids, strict=True)],
            )

    def encode(self, texts: Sequence[Any], special: bool = False) -> Iterator[Any]:
        """The `tokenizers.Encoding` of each text or pair of texts, whose offsets count characters.

        Args:
            special: with the special tokens around them, by which truncation counts.
        """
        for start in range(0, len(texts), AT_ONCE):
            yield from self.tokenizer.encode_batch(texts[start : start + AT_ONCE], add_special_tokens=special)

    def surroundings(self, pairs: bool) -> Surroundings:
        """What the tokenizer puts around one text, or around two."""
        probe = self.tokenizer.encode("a", "a") if pairs else self.tokenizer.encode("a")
        parts, ids = probe.sequence_ids, probe.ids
        first = [index for index, part in enumerate(parts) if part == 0]
        last = [index for index, part in enumerate(parts) if part == int(pairs)]
        return Surroundings(
            tuple(ids[: first[0]]), tuple(ids[first[-1] + 1 : last[0]]) if pairs else (), tuple(ids[last[-1] + 1 :])
        )


def stacked(*arrays: tuple[np.ndarray, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Sequences and segments [N, S] of several sets, given in pairs, one set behind the other."""
    sequences, segments = zip(*arrays, strict=True)
    return np.concatenate(sequences), np.concatenate(segments)


def digest_of(*arrays: np.ndarray) -> str:
    """sha256 of the arrays' contents, kinds and shapes."""
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(f"{array.dtype} {array.shape}\n".encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


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
