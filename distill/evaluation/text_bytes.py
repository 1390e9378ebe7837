"""How many UTF-8 bytes of text the tokens of a sequence stand for, in any vocabulary that writes blanks.

Counted is the text as the tokenizer's normalizer leaves it, such as in lower case, without unknown and special tokens
and without a blank that the tokenizer itself puts before a text. Vocabularies that drop blanks, as WordPiece does and
those that mark the ends of words (</w>), do not show the text: none of their tokens counts, and bits per byte are not
measured.

Shapes: B sequences, S positions, V vocabulary.
"""

import re
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

BYTE = re.compile("<0x[0-9A-Fa-f]{2}>")  # a byte of a character that the vocabulary lacks
PROBE = "\u65e5"  # what ByteLevel writes in other characters


class TextBytes:
    """Counts the bytes of the tokens of sequences."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.backend: Any = tokenizer.backend_tokenizer
        blank = re.search("a(.+)b", self._pieces("a b"))
        mark = "" if blank is None else blank[1]  # what a blank is written as
        prepends, in_bytes = self._pieces("a").startswith(mark), PROBE not in self._pieces(PROBE)
        has_bytes = getattr(self.backend.model, "byte_fallback", True)
        added = tokenizer.added_tokens_decoder
        special = {*tokenizer.all_special_ids, *(number for number, token in added.items() if token.special)}
        tokens = [token or "" for token in tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))]
        size = len(tokens) + 1  # the last: ids that are no tokens, such as those of padding
        self.is_text, self.is_marked, self.num_bytes = np.zeros(size, bool), np.zeros(size, bool), np.zeros(size, int)
        for number, token in enumerate(tokens if mark else []):
            self.is_text[number] = number not in special
            self.is_marked[number] = prepends and token.startswith(mark)
            if number in added:
                self.num_bytes[number] = len(token.encode())
            elif in_bytes:
                self.num_bytes[number] = len(token)  # one character stands for one byte
            elif has_bytes and BYTE.fullmatch(token):
                self.num_bytes[number] = 1
            else:
                self.num_bytes[number] = len(token.replace(mark, " ").encode())

    def __call__(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """ids [B, S] -> whether each is text [B, S], and the bytes that it adds to the text before it [B, S] int64."""
        ids = np.minimum(ids, len(self.is_text) - 1)
        is_text, num_bytes = self.is_text[ids], self.num_bytes[ids]
        follows = np.zeros_like(is_text)
        follows[:, 1:] = is_text[:, :-1]
        return is_text, np.where(is_text, num_bytes - (~follows & self.is_marked[ids]), 0)

    def _pieces(self, text: str) -> str:
        """A text as it comes to the vocabulary."""
        if self.backend.normalizer is not None:
            text = self.backend.normalizer.normalize_str(text)
        if self.backend.pre_tokenizer is None:
            return text
        return "".join(piece for piece, _ in self.backend.pre_tokenizer.pre_tokenize_str(text))
