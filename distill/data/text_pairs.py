"""Texts and pairs of texts as sequences, cut to fit as the tokenizer does it, with a class or a value for each.

Shapes: N sequences, S positions.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np

from distill.data.sequence_format import masked_format, padding_of
from distill.data.tables import LabelledTexts
from distill.runtime.errors import SettingError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

AT_ONCE = 1000  # texts that are tokenized together


class Surroundings(NamedTuple):
    """Special tokens of a sequence: `before` first `between` second `after`, or `before` text `after`."""

    before: tuple[int, ...]
    between: tuple[int, ...]  # none in a sequence of one text
    after: tuple[int, ...]

    @property
    def length(self) -> int:
        return sum(map(len, self))


class TextEncoder:
    """Tokenizes texts with a copy of a tokenizer; a special token's name in a text is text.

    Attributes:
        pad_id: what fills up sequences.
        dtype: of sequences: uint16 where the ids allow it, else uint32.
        tokenizer: the copy.

    Raises:
        SettingError: the tokenizer lacks a token that sequences need.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        from tokenizers import Tokenizer

        # That of a decoder often has no token for padding.
        is_decoders = tokenizer.mask_token_id is None and tokenizer.cls_token_id is None
        pad = padding_of(tokenizer) if is_decoders else None
        self.pad_id = masked_format(tokenizer).pad if pad is None else pad
        self.dtype = np.dtype(np.uint16 if max(len(tokenizer), self.pad_id + 1) <= 1 << 16 else np.uint32)
        self.tokenizer = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        self.tokenizer.no_padding()
        self.tokenizer.no_truncation()
        self.tokenizer.encode_special_tokens = True

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


def digest_of(*arrays: np.ndarray) -> str:
    """sha256 of the arrays' contents, kinds and shapes."""
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(f"{array.dtype} {array.shape}\n".encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


@dataclass(frozen=True, kw_only=True)
class LabelledSequences:
    """N sequences of examples, of which the first L have targets; in evaluation, and without a teacher, all have."""

    sequences: np.ndarray  # [N, S] uint16 or uint32: [CLS] text [SEP] or [CLS] text [SEP] text [SEP], then padding
    segments: np.ndarray  # [N, S] uint8: 1 from the second text's first token to the last [SEP], else 0
    targets: dict[str, np.ndarray]  # [L] each, by task: int64 classes or positions, or float64 values
    pad_id: int
    digest: str  # sha256 of all that decides training and scores

    def __len__(self) -> int:
        return len(self.sequences)

    def with_unlabelled(self, others: Self) -> Self:
        """And behind them those of texts without targets, for training."""
        sequences = np.concatenate([self.sequences, others.sequences])
        segments = np.concatenate([self.segments, others.segments])
        digest = digest_of(sequences, segments, *self.targets.values())
        return replace(self, sequences=sequences, segments=segments, digest=digest)


@dataclass(frozen=True, kw_only=True)
class ClassSequences(LabelledSequences):
    """N sequences of texts or pairs of texts, with a target `class` or none."""

    cut: int = 0  # sequences whose texts did not fit

    def with_unlabelled(self, others: Self) -> Self:
        return replace(super().with_unlabelled(others), cut=self.cut + others.cut)


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
    if max_length < around.length + 1 + is_pair:
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
    return ClassSequences(
        sequences=sequences,
        segments=segments,
        targets={"class": texts.labels},
        pad_id=encoder.pad_id,
        digest=digest_of(sequences, segments, texts.labels),
        cut=cut,
    )
