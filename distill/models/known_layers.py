"""Layers of supported families in pieces: to compute a layer at some positions only.

Shapes: B sequences, S positions, P positions of each sequence, H hidden size, A heads.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    BertForMaskedLM,
    BertModel,
    DistilBertForMaskedLM,
    DistilBertModel,
    RobertaForMaskedLM,
    RobertaModel,
)

from distill.models.kernels.attention import attention
from distill.models.kernels.packed_linear import PackedLinear

MAX_FRACTION = 0.9  # of a sequence's positions above which picking them costs more than it saves
ENCODERS = {BertForMaskedLM: BertModel, DistilBertForMaskedLM: DistilBertModel, RobertaForMaskedLM: RobertaModel}


@dataclass(frozen=True)
class Layer:
    """An encoder layer without position terms in its attention, in the pieces that can be computed apart.

    Dropout is in none of them but what follows attention.
    """

    block: Any  # the whole layer
    query: nn.Linear | PackedLinear
    key: nn.Linear | PackedLinear
    value: nn.Linear | PackedLinear
    num_heads: int
    rest: Callable[[Tensor, Tensor], Tensor]  # (attended, the layer's input) -> the layer's output


def known_layers(model: Any) -> list[Layer] | None:
    """The layers of a model whose encoder is a supported class, else None: a subclass may compute something else."""
    encoder: Any = getattr(model, "base_model", None)
    is_known = ENCODERS.get(type(model)) is type(encoder)
    if not is_known or getattr(model.config, "is_decoder", False):
        return None
    if type(model) is DistilBertForMaskedLM:
        layers = [_distilbert(block) for block in encoder.transformer.layer]
    else:
        layers = [_bert(block) for block in encoder.encoder.layer]
    # What else stands in for a linear layer (an adapter) has weights of another form.
    linears = [linear for layer in layers for linear in (layer.query, layer.key, layer.value)]
    plain = all(type(linear) in (nn.Linear, PackedLinear) for linear in linears)
    return layers if plain and layers else None


def _bert(block: Any) -> Layer:
    inner = block.attention.self

    def rest(attended: Tensor, x: Tensor) -> Tensor:
        output: Tensor = block.feed_forward_chunk(block.attention.output(attended, x))
        return output

    return Layer(block, inner.query, inner.key, inner.value, inner.num_attention_heads, rest)


def _distilbert(block: Any) -> Layer:
    inner = block.attention

    def rest(attended: Tensor, x: Tensor) -> Tensor:
        x = block.sa_layer_norm(inner.out_lin(attended) + x)
        output: Tensor = block.output_layer_norm(block.ffn.ff_chunk(x) + x)
        return output

    return Layer(block, inner.q_lin, inner.k_lin, inner.v_lin, inner.n_heads, rest)


def attend(layer: Layer, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    """Softmax attention of every head: query [B, P, H], key and value [B, S, H] -> [B, P, H].

    mask: None, or broadcastable to [B, A, P, S]: bool (True: look here) or to be added to the scores.
    """
    query, key, value = (x.unflatten(-1, (layer.num_heads, -1)).transpose(1, 2) for x in (query, key, value))
    return attention(layer.block, query, key, value, mask, is_causal=False)[0].flatten(2)


@contextmanager
def last_block_at(model: Any, positions: Tensor | None) -> Iterator[bool]:
    """While it is open the encoder's last block gives its output at `positions` alone, [1, N, H] for [B, S, H].

    Keys and values are computed everywhere, all else of the block at these positions: but for rounding, the same
    numbers. Gives whether it is so: not for unsupported classes, under dropout, whose random numbers belong to whole
    sequences, for compiled blocks, and on GPUs, which would have to wait for the number of positions of a sequence.

    Args:
        positions: flat ones [N] in B * S; None: all of them. The whole block is computed where they do not ascend.
    """
    fits = positions is not None and positions.device.type == "cpu" and not (positions[1:] < positions[:-1]).any()
    layer = _reducible(model) if fits else None
    if layer is None:
        yield False
        return

    def forward(x: Tensor, mask: Tensor | None = None, *others: Any, **named: Any) -> Tensor:
        assert positions is not None and layer is not None
        return _at(layer, x, mask, positions)

    layer.block.forward = forward
    try:
        yield True
    finally:
        del layer.block.forward


def _reducible(model: Any) -> Layer | None:
    """The last block where it can be computed at some positions only."""
    layers = known_layers(model)
    if not layers:
        return None
    block = layers[-1].block
    if "forward" in vars(block) or (block.training and any(drops(module) for module in block.modules())):
        return None
    return layers[-1]


def drops(module: nn.Module) -> bool:
    """Whether it is a dropout of torch or of this package, and sets anything to zero."""
    rate = getattr(module, "p", 0.0)
    return isinstance(rate, float | int) and rate > 0


def _at(layer: Layer, x: Tensor, mask: Tensor | None, positions: Tensor) -> Tensor:
    """The layer's output at flat positions [N] of x [B, S, H], as [1, N, H].

    Sequences have unlike numbers of them: shorter ones are filled up with their first position, which is not read.
    """
    if not len(positions):
        return x.flatten(0, 1)[None, :0]
    num_rows, length = x.shape[:2]
    row = positions // length
    counts = torch.bincount(row, minlength=num_rows)
    longest = int(counts.max())
    mask = mask if mask is None or mask.shape[-2] == 1 else mask[..., :1, :]  # all queries attend to all but padding
    if longest > MAX_FRACTION * length:
        attended = attend(layer, layer.query(x), layer.key(x), layer.value(x), mask)
        return layer.rest(attended, x).flatten(0, 1).index_select(0, positions)[None]
    column = torch.arange(len(positions)) - (counts.cumsum(0) - counts)[row]
    picked = torch.arange(num_rows)[:, None].expand(-1, longest) * length
    picked = picked.index_put((row, column), positions)
    here = x.flatten(0, 1).index_select(0, picked.flatten()).unflatten(0, (num_rows, longest))
    attended = attend(layer, layer.query(here), layer.key(x), layer.value(x), mask)
    output = layer.rest(attended, here)
    return output.flatten(0, 1).index_select(0, row * longest + column)[None]
