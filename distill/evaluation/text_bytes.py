"""How many UTF-8 bytes of text the tokens of a sequence stand for, whatever marks a vocabulary writes words with.

Counted is the text as the tokenizer's normalizer leaves it, such as in lower case, without unknown and special tokens
and without a blank that the tokenizer itself puts before a text. Blanks that a tokenizer drops, as WordPiece does and
vocabularies that mark the ends of words (</w>), are those of print: one between words, none before a full stop.

Shapes: B sequences, S positions, V vocabulary.
"""

import re
from typing import Any

import numpy as np
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerBase

BYTE = re.compile("<0x[0-9A-Fa-f]{2}>")  # a byte of a character that the vocabulary lacks
CLOSING = frozenset(".,;:!?)]}%'\u2019\u201d\u2026-\u2013\u2014/")  # no blank is before them
OPENING = frozenset("([{'\u2018\u201c-\u2013\u2014/$#\"")  # nor behind these
IDEOGRAPHS = re.compile("[\u2e80-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]")  # nor on either side
PROBE = "\u65e5"  # what ByteLevel writes in other characters


class TextBytes:
    """Counts the bytes of the tokens of sequences."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.backend: Any = tokenizer.backend_tokenizer
        model = self.backend.model
        prefix, suffix = _attribute(model, "continuing_subword_prefix"), _attribute(model, "end_of_word_suffix")
        blank = re.search("a(.*)b", self._pieces("a b"))
        self.mark = "" if blank is None else blank[1]  # what a blank is written as; "": it is dropped
        self.prepends = bool(self.mark) and self._pieces("a").startswith(self.mark)
        added = tokenizer.added_tokens_decoder
        special = {*tokenizer.all_special_ids, *(number for number, token in added.items() if token.special)}
        tokens = [token or "" for token in tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))]
        size = len(tokens) + 1  # the last: ids that are no tokens, such as those of padding
        self.is_text = np.array([number not in special for number in range(len(tokens))] + [False])
        self.ends = np.array([bool(suffix) and token.endswith(suffix) for token in tokens] + [False])
        self.continues = np.array([bool(prefix) and token.startswith(prefix) for token in tokens] + [False])
        texts = [token.removeprefix(prefix).removesuffix(suffix) for token in tokens]
        self.num_bytes, self.is_marked = np.zeros(size, np.int64), np.zeros(size, bool)
        in_bytes = PROBE not in self._pieces(PROBE)
        for number, text in enumerate(texts):
            self.is_marked[number] = self.prepends and text.startswith(self.mark)
            if number in added:
                self.num_bytes[number] = len(text.encode())
            elif in_bytes:
                self.num_bytes[number] = len(text)  # one character stands for one byte
            elif BYTE.fullmatch(text) and getattr(model, "byte_fallback", True):
                self.num_bytes[number] = 1
            else:
                self.num_bytes[number] = len((text.replace(self.mark, " ") if self.mark else text).encode())
        # The blank's own mark, where the vocabulary lacks it, is written as several of these for one byte of text.
        numbers = {token.upper(): number for number, token in enumerate(tokens) if BYTE.fullmatch(token)}
        lone = [numbers.get(f"<0X{byte:02X}>") for byte in self.mark.encode()] if self.mark not in tokens else []
        self.fallback = [number for number in lone if number is not None] if None not in lone and len(lone) > 1 else []
        self.drops = not self.mark and (bool(prefix or suffix) or isinstance(model, WordLevel))
        self.begins_by_end = bool(suffix)
        self._set_signs(texts)

    def __call__(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """ids [B, S] -> whether each is text [B, S], and the bytes that it adds to the text before it [B, S] int64.

        Their sum is that of the text; single ones may be below 0, as a third byte shows that three were a blank.
        """
        ids = np.minimum(ids, len(self.is_text) - 1)
        before = np.concatenate([np.full((len(ids), 1), len(self.is_text) - 1), ids[:, :-1]], 1)
        is_text, follows = self.is_text[ids], self.is_text[before]
        num_bytes = np.where(is_text, self.num_bytes[ids], 0)
        num_bytes -= is_text & ~follows & self.is_marked[ids]
        if self.drops:
            begins = self.ends[before] if self.begins_by_end else ~self.continues[ids]
            num_bytes += is_text & follows & begins & ~self.closes[ids] & ~self.opens[before]
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

    def _splits(self, text: str) -> bool:
        if self.backend.normalizer is not None:
            text = self.backend.normalizer.normalize_str(text)
        return len(self.backend.pre_tokenizer.pre_tokenize_str(text)) > 1

    def _set_signs(self, texts: list[str]) -> None:
        """Which tokens have no blank before them, and which none behind, [V + 1]."""
        self.closes, self.opens = np.zeros((2, len(texts) + 1), bool)
        if not self.drops or self.backend.pre_tokenizer is None:
            return
        signs, ideographs = self._splits("a."), self._splits(PROBE * 2)
        for number, text in enumerate(texts):
            alone = ideographs and IDEOGRAPHS.match(text) is not None
            self.closes[number] = alone or (signs and text[:1] in CLOSING)
            self.opens[number] = alone or (signs and text[-1:] in OPENING)


def _attribute(model: Any, name: str) -> str:
    """A mark of the vocabulary; "" where it has none."""
    return getattr(model, name, None) or ""
