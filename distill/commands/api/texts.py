"""Texts as sequences of token ids for training and scoring, for masked and causal models alike.

Shapes: N sequences, S positions.
"""

from collections.abc import Sequence
from dataclasses import replace
from io import BytesIO
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from distill.config.settings import MaskingConfig
from distill.data.batches import Collator
from distill.data.collate.clm import causal_lm
from distill.data.collate.mlm import masked_lm
from distill.data.document import Document
from distill.data.heldout import HeldOut
from distill.data.packing import Packing, SequenceWriter, pack_stretch, plain_tokenizer
from distill.data.sequence_format import causal_format, masked_format
from distill.models.kind import ModelKind
from distill.runtime.errors import SettingError


def text_sequences(
    texts: Sequence[str], tokenizer: PreTrainedTokenizerBase, kind: ModelKind, length: int
) -> np.ndarray:
    """[N, S] int64, S at most `length`: every text in sequences of its own, as a run cuts them, then padding.

    Raises:
        SettingError: one string in place of a list, no text has a token, `length` is too short for one, or the
            tokenizer lacks a special token.
    """
    if isinstance(texts, str):
        raise SettingError("texts is one string: give a list of texts")
    # The command leaves out ends of documents that are shorter; here a batch has all that it is given.
    format = replace(causal_format(tokenizer) if kind.causal else masked_format(tokenizer), shortest=1)
    if length <= format.body:
        raise SettingError(f"sequence_length={length}: no room for text; give 128, for example")
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise SettingError(f"the tokenizer, a {type(tokenizer).__name__}, is a slow one: give a fast one")
    packing = Packing(plain_tokenizer(backend.to_str()), len(tokenizer), format, length, False, HeldOut(0.0))
    with BytesIO() as file:
        writer = SequenceWriter(file, packing)
        for text in texts:
            if text.strip():
                pack_stretch(Document("", text), writer, packing)
        sequences = np.frombuffer(file.getvalue(), packing.dtype).reshape(-1, length).astype(np.int64)
    if not len(sequences):
        raise SettingError("texts: none of them has a token; give a list of texts")
    longest = int(np.flatnonzero((sequences != format.pad).any(0))[-1]) + 1
    return sequences[:, :longest]


def text_collator(tokenizer: PreTrainedTokenizerBase, kind: ModelKind, masking: MaskingConfig) -> Collator:
    """Makes micro-batches of such sequences; only masked models read `masking`, without its smoothing."""
    if kind.causal:
        return causal_lm(tokenizer, packed=False)
    counts: Any = np.ones(
        len(tokenizer), np.int64
    )  # how often tokens occur in a corpus, which a list of texts does not have
    return masked_lm(masking, tokenizer, counts)
