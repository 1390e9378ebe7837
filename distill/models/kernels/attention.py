"""Attention on the CPU as batched products, where they are faster than torch's SDPA: in bf16, and under dropout."""

import math
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from distill.models.kernels import is_known
from distill.models.kernels.dropout import factors
from distill.models.kernels.masks import PREFIX, known_mask

NAME = PREFIX + "products"  # of `attention`, in transformers' list
DROPOUT_ONLY = PREFIX + "products_for_dropout"  # the same, but torch's SDPA wherever nothing is dropped
MAX_SCORES = 1 << 27  # 256 MiB in bf16: from here on torch's kernels, which keep no scores


def use_batched_products(model: Any, plain: bool = False) -> None:
    """Let a model of a known family attend by `attention`; one that does not use SDPA is left as it is.

    Args:
        plain: only under dropout, whose random numbers have to be those of the sequences (see `dropout`).
    """
    if is_known(model) and model.config._attn_implementation == "sdpa":
        name = DROPOUT_ONLY if plain else NAME
        AttentionInterface.register(name, _attention_under_dropout if plain else attention)
        AttentionMaskInterface.register(name, known_mask if plain else _added_mask)
        model.set_attn_implementation(name)


def _added_mask(
    *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu", **named: Any
) -> Tensor | None:
    """transformers' mask function, called once a forward: what is added to the scores in place of a boolean mask.

    Every layer would make this of a boolean one, or spend a slow pass over the scores on it.
    """
    visible = known_mask(dtype=dtype, device=device, **named)
    if visible is None:
        return None
    kind = torch.device(device).type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else dtype
    return torch.zeros((), dtype=dtype, device=device).where(visible, unseen(dtype))


def unseen(dtype: torch.dtype) -> float:
    """What is added to a score that does not count.

    Not -inf: padding may have nowhere to look, and then would be nan. Half of the lowest number: in fp16 that number
    itself and a negative score are -inf together.
    """
    return torch.finfo(dtype).min / 2


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """transformers' attention function: query, key and value [B, heads, S, size] -> [B, S, heads, size].

    attention_mask: None, or broadcastable to [B, heads, S, S]: bool (True: look here) or to be added to the scores.
    Without one a causal module attends to earlier positions, as in torch's SDPA. Keys and values of fewer heads than
    the queries serve groups of them.
    """
    if torch.is_autocast_enabled(query.device.type):  # which supports SDPA, and not the products
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    num_scores = query.shape[:-1].numel() * key.shape[-2]
    is_faster = query.device.type == "cpu" and query.dtype == torch.bfloat16 and num_scores <= MAX_SCORES
    # Under torch.compile dropout draws torch's numbers, here as in the other layers.
    by_torch = torch.compiler.is_compiling() if dropout > 0 else not is_faster
    if by_torch:
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **others)
    scale = 1 / math.sqrt(query.shape[-1]) if scaling is None else scaling
    if attention_mask is None and getattr(module, "is_causal", False):
        size = query.shape[2]
        attention_mask = torch.full((size, size), unseen(query.dtype), dtype=query.dtype, device=query.device).triu_(1)
    if (groups := query.shape[1] // key.shape[1]) > 1:
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    return products(query, key, value, attention_mask, scale, dropout).transpose(1, 2).contiguous(), None


def _attention_under_dropout(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **others: Any
) -> tuple[Tensor, None]:
    """`attention` where something is dropped, else torch's SDPA."""
    function = attention if others.get("dropout") else sdpa_attention_forward
    return function(module, query, key, value, attention_mask, **others)


def products(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, dropout: float = 0.0
) -> Tensor:
    """softmax(scale * query key^T) value, with a part of the softmax dropped: [B, heads, S, size] in and out."""
    with torch.autocast(query.device.type, enabled=False):  # it would take the scores to fp32 and back
        scores = (query * scale) @ key.mT
        if mask is not None and mask.dtype == torch.bool:
            scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
        elif mask is not None:
            scores = scores.add_(mask)
        weights = scores.softmax(-1)
        if dropout > 0:
            weights = weights * factors(weights, dropout)
        return weights @ value
