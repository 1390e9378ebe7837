"""Texts as sequences of token ids for training and scoring, for masked and causal models alike.

Shapes: N sequences, S positions.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from distill.config.settings import MaskingConfig
from distill.data.batches import Collator
from distill.data.collate.clm import CausalLM
from distill.data.collate.mlm import masked_lm
from distill.data.sequence_format import causal_format, masked_format
from distill.data.text_pairs import TextEncoder
from distill.models.kind import ModelKind
from distill.runtime.errors import SettingError


def text_sequences(
    texts: Sequence[str], tokenizer: PreTrainedTokenizerBase, kind: ModelKind, length: int
) -> np.ndarray:
    """[N, S] int64, S at most `length`: every text in sequences of its own, as many as it fills, then padding.

    Raises:
        SettingError: one string in place of a list, no text has a token, `length` is too short for one, or the
            tokenizer lacks a special token.
    """
    if isinstance(texts, str):
        raise SettingError("texts is one string: give a list of texts")
    if kind.causal:
        ends = causal_format(tokenizer)
        first = [] if ends.document_start is None else [ends.document_start]
        before, after, pad = [], [], ends.pad
        encoded = [[*first, *ids, int(ends.document_end or 0)] for ids in _causal_ids(texts, tokenizer) if ids]
    else:
        encoder = TextEncoder(tokenizer)
        around = encoder.surroundings(pairs=False)
        before, after, pad = list(around.before), list(around.after), masked_format(tokenizer).pad
        encoded = [list(text.ids) for text in encoder.encode(texts) if text.ids]
    room = length - len(before) - len(after)
    if room < 1:
        raise SettingError(f"sequence_length={length}: no room for text; give 128, for example")
    rows = [[*before, *ids[start : start + room], *after] for ids in encoded for start in range(0, len(ids), room)]
    if not rows:
        raise SettingError("texts: none of them has a token; give a list of texts")
    sequences = np.full((len(rows), max(map(len, rows))), pad, np.int64)
    for number, row in enumerate(rows):
        sequences[number, : len(row)] = row
    return sequences


def _causal_ids(texts: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    ids: list[list[int]] = tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"] if texts else []
    return ids


def text_collator(tokenizer: PreTrainedTokenizerBase, kind: ModelKind, masking: MaskingConfig) -> Collator:
    """Makes micro-batches of such sequences; only masked models read `masking`, without its smoothing."""
    if kind.causal:
        return CausalLM(causal_format(tokenizer), packed=False)
    counts: Any = np.ones(
        len(tokenizer), np.int64
    )  # how often tokens occur in a corpus, which a list of texts does not have
    return masked_lm(masking, tokenizer, counts)
