"""One or two texts in a sequence: ids without special tokens, and which of these a tokenizer puts around the texts."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from distill.data.sequence_format import SequenceFormat, masked_format, padding_of

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
    """Tokenizes texts; a special token's name in a text is text.

    Attributes:
        pad_id: what fills up sequences.
        dtype: of sequences: uint16 where the ids allow it, else uint32.

    Raises:
        SettingError: the tokenizer lacks a token that sequences need.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        from tokenizers import Tokenizer

        # The tokenizer of a decoder has a rule of its own, or none, and often no token for padding.
        is_decoders = tokenizer.mask_token_id is None and tokenizer.cls_token_id is None
        pad = padding_of(tokenizer) if is_decoders else None
        self._usual: SequenceFormat | None = None
        if pad is None:
            self._usual = masked_format(tokenizer)
            pad = self._usual.pad
        self.pad_id = pad
        self.dtype = np.dtype(np.uint16 if max(len(tokenizer), self.pad_id + 1) <= 1 << 16 else np.uint32)
        # A copy of the tokenizer's own, which may still have the padding or truncation of its last use.
        self._tokenizer = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._tokenizer.encode_special_tokens = True

    def encode(self, texts: Sequence[str]) -> Iterator[Any]:
        """The `tokenizers.Encoding` of each text, without special tokens; its offsets count characters."""
        for start in range(0, len(texts), AT_ONCE):
            yield from self._tokenizer.encode_batch(texts[start : start + AT_ONCE], add_special_tokens=False)

    def surroundings(self, pairs: bool) -> Surroundings:
        """What the tokenizer puts around one text, or around two; [CLS] and [SEP] where an encoder's has no rule."""
        probe = self._tokenizer.encode("a", "a") if pairs else self._tokenizer.encode("a")
        parts, ids = probe.sequence_ids, probe.ids
        first = [index for index, part in enumerate(parts) if part == 0]
        last = [index for index, part in enumerate(parts) if part == int(pairs)]
        around = Surroundings(
            tuple(ids[: first[0]]), tuple(ids[first[-1] + 1 : last[0]]) if pairs else (), tuple(ids[last[-1] + 1 :])
        )
        if around.before or self._usual is None:
            return around
        start, separator = self._usual.row_start, self._usual.row_end
        assert start is not None and separator is not None
        return Surroundings((start,), (separator,) if pairs else (), (separator,))


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
