"""Causal language modelling: every position predicts the next token of its own document.

Shapes: B sequences, S positions.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from distill.data.batch import PADDING, Batch, Labels
from distill.data.sequence_format import SequenceFormat, causal_format, first_token
from distill.data.sequence_store import INNER, ids_of, loss_mask_of, outer_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class CausalLM:
    """Shifted targets, and positions that start anew with every document of a sequence.

    A sequence may hold several documents. None of them sees another: position ids that start anew mark for
    transformers' causal models where a document begins. Padding is taken for a document of its own. Tokens of prompts
    are seen like others and are no targets.

    A sequence that continues a document lacks the beginning-of-text token, without which some models, Gemma above all,
    predict next to nothing. There `first` takes the place of the first token, which nothing predicts anyway; but a
    conversation stays as its template has written it.
    """

    format: SequenceFormat
    packed: bool  # whether sequences may hold several documents
    first: int | None = None  # what every sequence begins with; None: what the text has there

    @property
    def pad_id(self) -> int:
        return self.format.pad

    @property
    def identity(self) -> str:
        """Everything that decides the targets of a sequence."""
        return repr(self)

    def collate(self, tokens: np.ndarray, row_keys: np.ndarray, row_ids: np.ndarray) -> Batch:
        """A micro-batch of the sequences tokens [B, S]; nothing in it is random."""
        ids, outer = ids_of(tokens), outer_ids(tokens)
        valid, documents = outer != self.pad_id, self.documents(outer)
        if self.first is not None:
            ids = ids.copy()
            ids[valid[:, 0] & (outer[:, 0] != INNER), 0] = self.first
        # The last position of a document predicts nothing: the next token is another's, or padding.
        predicts = np.zeros_like(valid)
        predicts[:, :-1] = (valid & loss_mask_of(tokens))[:, 1:] & (documents[:, 1:] == documents[:, :-1])
        targets, positions = np.roll(ids, -1, axis=1), np.flatnonzero(predicts)
        inputs, places = {"input_ids": torch.from_numpy(np.where(valid, ids, 0))}, restarting(documents)
        if self.packed and documents[:, -1].any():  # else positions are those that every model takes anyway
            inputs["position_ids"] = torch.from_numpy(places)
        inputs["document_lengths"] = torch.from_numpy(document_lengths(places))
        return Batch(
            inputs=inputs,
            documents=None if valid.all() else torch.from_numpy(np.where(valid, 0, PADDING)),
            labels={"clm": Labels(torch.from_numpy(positions), torch.from_numpy(targets.reshape(-1)[positions]))},
            valid_positions=None if valid.all() else torch.from_numpy(np.flatnonzero(valid)),
            row_ids=row_ids,
        )

    def documents(self, ids: np.ndarray) -> np.ndarray:
        """`outer_ids` [B, S] -> [B, S], the number of each position's document; padding has one of its own."""
        begins = np.zeros(ids.shape, np.int64)
        if self.packed:
            begins[:, 1:] = ids[:, :-1] == self.format.document_end
        begins[:, 1:] |= (ids[:, 1:] == self.pad_id) & (ids[:, :-1] != self.pad_id)
        return begins.cumsum(1)


def causal_lm(tokenizer: "PreTrainedTokenizerBase", packed: bool) -> CausalLM:
    """Batches as a causal model with this tokenizer expects them."""
    return CausalLM(causal_format(tokenizer), packed, first_token(tokenizer))


def restarting(documents: np.ndarray) -> np.ndarray:
    """[B, S] numbers that grow along a sequence -> [B, S], each position counted from where its document begins."""
    columns = np.broadcast_to(np.arange(documents.shape[1]), documents.shape)
    begins = np.zeros(documents.shape, bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return columns - np.maximum.accumulate(np.where(begins, columns, 0), axis=1)


def document_lengths(positions: np.ndarray) -> np.ndarray:
    """Positions [B, S] as by `restarting` -> [D], the lengths of all documents, one sequence after the other."""
    lengths: np.ndarray = np.diff(np.flatnonzero(positions == 0), append=positions.size)
    return lengths
