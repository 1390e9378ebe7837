"""How many UTF-8 bytes of text the tokens of a sequence stand for, by the marks that a vocabulary writes blanks with.

Counted is the text as the tokenizer's normalizer leaves it, such as in lower case, without unknown and special tokens
and without a blank that the tokenizer itself puts before a text. Vocabularies that drop blanks, as WordPiece does, do
not tell the bytes of a text: of these nothing counts as text.

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
        blank = re.search("a(.*)b", self._pieces("a b"))
        self.mark = "" if blank is None else blank[1]  # what a blank is written as; "": it is dropped
        self.prepends = bool(self.mark) and self._pieces("a").startswith(self.mark)
        added = tokenizer.added_tokens_decoder
        special = {*tokenizer.all_special_ids, *(number for number, token in added.items() if token.special)}
        tokens = [token or "" for token in tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))]
        # The last of each: of ids that are no tokens, such as those of padding.
        self.is_text = np.array([bool(self.mark) and number not in special for number in range(len(tokens))] + [False])
        self.is_marked = np.array([self.prepends and token.startswith(self.mark) for token in tokens] + [False])
        self.num_bytes = np.zeros(len(tokens) + 1, np.int64)
        is_in_bytes, falls_back = PROBE not in self._pieces(PROBE), getattr(self.backend.model, "byte_fallback", True)
        for number, token in enumerate(tokens):
            if number in added:
                self.num_bytes[number] = len(token.encode())
            elif is_in_bytes:
                self.num_bytes[number] = len(token)  # one character stands for one byte
            elif BYTE.fullmatch(token) and falls_back:
                self.num_bytes[number] = 1
            else:
                self.num_bytes[number] = len((token.replace(self.mark, " ") if self.mark else token).encode())
        # The blank's own mark, where the vocabulary lacks it, is written as several of these for one byte of text.
        numbers = {token.upper(): number for number, token in enumerate(tokens) if BYTE.fullmatch(token)}
        lone = [numbers.get(f"<0X{byte:02X}>") for byte in self.mark.encode()] if self.mark not in tokens else []
        self.fallback = [number for number in lone if number is not None] if None not in lone and len(lone) > 1 else []

    def __call__(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """ids [B, S] -> whether each is text [B, S], and the bytes that it adds to the text before it [B, S] int64.

        Their sum is that of the text; single ones may be below 0, as a third byte shows that three were a blank.
        """
        ids = np.minimum(ids, len(self.is_text) - 1)
        before = np.concatenate([np.full((len(ids), 1), len(self.is_text) - 1), ids[:, :-1]], 1)
        is_text, follows = self.is_text[ids], self.is_text[before]
        num_bytes = np.where(is_text, self.num_bytes[ids], 0)
        num_bytes -= is_text & ~follows & self.is_marked[ids]
        if self.fallback and ids.shape[1] >= len(self.fallback):
            count = len(self.fallback)
            windows = np.lib.stride_tricks.sliding_window_view(ids, count, axis=1)
            found = (windows == self.fallback).all(-1)
            is_added = ~follows[:, : found.shape[1]] if self.prepends else np.zeros_like(found)
            num_bytes[:, count - 1 :] -= found * (count - 1 + is_added)
        return is_text, num_bytes

    def _pieces(self, text: str) -> str:
        """A text as it comes to the vocabulary."""
        if self.backend.normalizer is not None:
            text = self.backend.normalizer.normalize_str(text)
        if self.backend.pre_tokenizer is None:
            return text
        return "".join(piece for piece, _ in self.backend.pre_tokenizer.pre_tokenize_str(text))
