"""The head's input at the masked position of many masked copies, without what the copies share or nothing reads.

Pseudo-perplexity runs copies of a sequence that differ from it at one position, and reads the result at that position
only. So the first layer's projections are made once per sequence and put right at the masked position, and the last
layer is computed at that position alone. Both are exact but for rounding. Other families than those here run in full.

Shapes: R sequences, S positions, B copies, H hidden size, E input size of the output embedding, A heads, D size of a
head.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import BertForMaskedLM, DistilBertForMaskedLM, DistilBertModel, RobertaForMaskedLM

from distill.data.batch import PADDING
from distill.evaluation.readers import MeanReader
from distill.models.kernels.packed_linear import PackedLinear
from distill.models.known_layers import Layer, attend, known_layers
from distill.models.language_model import LanguageModel, OutputSpec

# Of the models with exact formulas here: what they do between the last hidden state [N, H] and the output embedding
# [N, E].
PREDICTION_HEADS: dict[type, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    BertForMaskedLM: lambda m, x: m.cls.predictions.transform(x),
    DistilBertForMaskedLM: lambda m, x: m.vocab_layer_norm(m.activation(m.vocab_transform(x))),
    RobertaForMaskedLM: lambda m, x: m.lm_head.layer_norm(nn.functional.gelu(m.lm_head.dense(x))),
}


@dataclass(frozen=True)
class Copies:
    """Copies of sequences with one position masked each. Many copies may be of the same sequence."""

    sequences: torch.Tensor  # [R, S]
    valid: torch.Tensor | None  # [R, S], False at padding; None: no padding
    row: torch.Tensor  # [B] which sequence a copy is of
    column: torch.Tensor  # [B] its masked position
    mask_id: int
    segments: torch.Tensor | None = None  # [R, S] number of the segment at each position; None: sequences have one

    def embedded(self, encoder: Any, masked: bool) -> torch.Tensor:
        """What an encoder of these makes of the copies [B, S, H], or of their sequences without masks [R, S, H]."""
        ids = self.ids() if masked else self.sequences
        if self.segments is None or isinstance(encoder, DistilBertModel):
            embedded: torch.Tensor = encoder.embeddings(ids)
            return embedded
        segments = self.segments if encoder.config.type_vocab_size > 1 else torch.zeros_like(self.segments)
        embedded = encoder.embeddings(ids, token_type_ids=segments[self.row] if masked else segments)
        return embedded

    def inputs(self) -> dict[str, torch.Tensor]:
        """What a model takes of the copies besides masks."""
        inputs = {"input_ids": self.ids()}
        return inputs if self.segments is None else inputs | {"token_type_ids": self.segments[self.row]}

    def ids(self) -> torch.Tensor:
        """[B, S]"""
        ids = self.sequences[self.row]
        ids[self.index] = self.mask_id
        return ids

    @property
    def index(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The masked positions, as an index into anything [B, S, ...]."""
        return torch.arange(len(self.row), device=self.row.device), self.column


def head_rows_at_masks(model: LanguageModel, copies: Copies) -> torch.Tensor:
    """Input of the output embedding of `model`, in evaluation mode, at the masked position of each copy, [B, E]."""
    if isinstance(model, MeanReader):
        return model.joined([head_rows_at_masks(member, copies) for member in model.members])
    layers = known_layers(model.model)
    if layers is None:
        documents = None if copies.valid is None else torch.where(copies.valid, 0, PADDING)[copies.row]
        positions = torch.arange(len(copies.row), device=copies.row.device) * copies.sequences.shape[1] + copies.column
        rows = model(copies.inputs(), documents, OutputSpec(True, positions)).head_rows
        assert rows is not None
        return rows
    return PREDICTION_HEADS[type(model.model)](model.model, _hidden_at_masks(model.model.base_model, layers, copies))


def _hidden_at_masks(encoder: Any, layers: list[Layer], copies: Copies) -> torch.Tensor:
    """Last hidden state at the masked position of each copy, [B, H]."""
    mask = None if copies.valid is None else copies.valid[copies.row][:, None, None]
    x = copies.embedded(encoder, masked=True)
    if len(layers) > 1:
        x = _first(layers[0], x, copies.embedded(encoder, masked=False), copies, mask)
    for layer in layers[1:-1]:
        x = layer.rest(attend(layer, layer.query(x), layer.key(x), layer.value(x), mask), x)
    return _last(layers[-1], x, copies, mask)


def _first(
    layer: Layer, x: torch.Tensor, rows: torch.Tensor, copies: Copies, mask: torch.Tensor | None
) -> torch.Tensor:
    """x [B, S, H] and rows [R, S, H], the embeddings with and without masks -> the layer's output [B, S, H]."""
    masked = x[copies.index]

    def project(linear: nn.Linear | PackedLinear) -> torch.Tensor:
        projected = linear(rows)[copies.row]
        projected[copies.index] = linear(masked)
        return projected

    return layer.rest(attend(layer, project(layer.query), project(layer.key), project(layer.value), mask), x)


def _last(layer: Layer, x: torch.Tensor, copies: Copies, mask: torch.Tensor | None) -> torch.Tensor:
    """x [B, S, H] -> the layer's output at the masked positions, [B, H].

    With one query per head, q (X K^T)^T = (q K) X^T and p (X V^T) = (p X) V^T: the products on the right are of B
    queries instead of B * S keys and values. The key's bias adds the same to all scores of a query, which the softmax
    takes out; the value's passes through, as attention sums to 1.
    """
    here = x[copies.index]
    key, value = (
        linear.weight.unflatten(0, (layer.num_heads, -1))  # [A, D, H]
        for linear in (layer.key, layer.value)
    )
    query = layer.query(here).unflatten(1, (layer.num_heads, -1))  # [B, A, D]
    projected = torch.einsum("bad,adh->bah", query, key)
    # The heads stand where positions usually do: they all look at the same X.
    seen = scaled_dot_product_attention(
        projected[:, None], x[:, None], x[:, None], attn_mask=mask, scale=query.shape[-1] ** -0.5
    )
    attended = torch.einsum("bah,adh->bad", seen[:, 0], value).flatten(1) + layer.value.bias
    return layer.rest(attended, here)
