"""What sizes a model has inside, as one forward of a few tokens shows them, whatever its configuration calls them."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from distill.models.language_model import LanguageModel, Outputs, OutputSpec
from distill.models.modes import in_evaluation_mode

NUM_TOKENS = 8


class AttentionShape(NamedTuple):
    """Sizes of a block's attention."""

    heads: int  # of queries
    widths: tuple[int, int, int]  # of queries, keys and values: heads * size of a head, as if each had its own


def hidden_widths(model: Any, layers: Sequence[int]) -> list[int]:
    """H of each of these hidden states, numbered as in `OutputSpec.layers`."""
    hidden = _forward(model, OutputSpec(layers=tuple(layers))).hidden
    return [hidden[layer].shape[-1] for layer in layers]


def pooled_width(model: Any, kind: str) -> int:
    """H of the vector of a whole sequence."""
    return _forward(model, OutputSpec(pooled=(kind,))).pooled[kind].shape[-1]


def attention_shapes(model: Any, blocks: Sequence[int]) -> list[AttentionShape]:
    """Sizes of the attention of each of these blocks, from 1.

    Raises:
        ValueError: the model does not show its queries and keys.
    """
    qkv = _forward(model, OutputSpec(qkv=tuple(blocks))).qkv
    heads = [qkv[block].query.shape[1] for block in blocks]
    sizes = [(qkv[b].query.shape[-1], qkv[b].key.shape[-1], qkv[b].value.shape[-1]) for b in blocks]
    return [AttentionShape(n, (n * q, n * k, n * v)) for n, (q, k, v) in zip(heads, sizes, strict=True)]


def _forward(model: Any, spec: OutputSpec) -> Outputs:
    """One in evaluation mode, without gradients; the model is left as it was."""
    ids = torch.arange(NUM_TOKENS, device=next(model.parameters()).device)[None]
    with torch.no_grad(), in_evaluation_mode(model):
        outputs: Outputs = LanguageModel(model)({"input_ids": ids}, None, spec)
    return outputs
