"""Records the queries, keys and values of a forward as the model's attention function gets them.

transformers' models look their attention function up by a name in their configuration, at every call. While a forward
is recorded that name stands for a function that records its arguments and then calls what the name stood for. So the
record holds what attention really uses: after rotary embeddings and norms, with the mask in force.

Shapes: B sequences, S positions, d size of a head.
"""

import functools
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

SUFFIX = "_recorded"


class QKV(NamedTuple):
    """What one block's attention works on: softmax(scaling * query key^T, where `mask` allows it) value."""

    query: Tensor  # [B, heads, S, d]
    key: Tensor  # [B, kv_heads, S, d]; a group of heads / kv_heads queries shares one key and value
    value: Tensor  # [B, kv_heads, S, d]
    mask: Tensor | None  # bool, broadcastable to [B, heads, S, S]: whether a query attends to a key; None: all to all
    scaling: float

    def repeated(self) -> "QKV":
        """This record with a key and a value for every query head."""
        groups = self.query.shape[1] // self.key.shape[1]
        if groups == 1:
            return self
        key, value = (each.repeat_interleave(groups, dim=1) for each in (self.key, self.value))
        return self._replace(key=key, value=value)

    def of_sequences(self, sequences: slice) -> "QKV":
        """That of some of the sequences of the batch."""
        shared = self.mask is None or (len(self.mask) == 1 and len(self.query) > 1)  # by all sequences
        mask = self.mask if shared or self.mask is None else self.mask[sequences]
        return QKV(self.query[sequences], self.key[sequences], self.value[sequences], mask, self.scaling)


def visible_to_both(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    """Two masks as `QKV.mask` -> where both let a query attend to a key; None: everywhere."""
    if one is None or other is None:
        return other if one is None else one
    return one & other


_keep: ContextVar[Callable[[QKV], None] | None] = ContextVar("keep", default=None)


@contextmanager
def record_attention(model: nn.Module, keep: Callable[[QKV], None]) -> Iterator[None]:
    """While it is open `keep` is called with what every attention of the model's forward works on, in order.

    A model with attention of its own, which is in no list of transformers', calls `keep` never.
    """
    of_parts: Any = (getattr(part, "config", None) for part in model.modules())
    unique = {id(config): config for config in of_parts if getattr(config, "_attn_implementation", None) is not None}
    before = [(config, config._attn_implementation) for config in unique.values()]
    for config, name in before:
        config._attn_implementation = _register(name)
    token = _keep.set(keep)
    try:
        yield
    finally:
        _keep.reset(token)
        for config, name in before:
            config._attn_implementation = name


def _register(name: str) -> str:
    """The name under which transformers finds the recording form of the attention function `name`."""
    AttentionInterface.register(name + SUFFIX, functools.partial(_attention, name))
    if name in ALL_MASK_ATTENTION_FUNCTIONS:
        AttentionMaskInterface.register(name + SUFFIX, ALL_MASK_ATTENTION_FUNCTIONS[name])
    return name + SUFFIX


def _attention(
    name: str, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, *rest: Any, **others: Any
) -> Any:
    """transformers' attention function: records what it is given, and calls the one that is named."""
    if (keep := _keep.get()) is not None:
        scaling = others.get("scaling")
        scaling = 1 / math.sqrt(query.shape[-1]) if scaling is None else scaling
        keep(QKV(query, key, value, _visible(name, module, query, mask, others), scaling))
    return _function(name, module)(module, query, key, value, mask, *rest, **others)


def _function(name: str, module: nn.Module) -> Callable[..., Any]:
    """The attention function that `module` would have looked up: its file may override those of the common list."""
    homes = (sys.modules[cls.__module__] for cls in type(module).__mro__)
    home: Any = next(home for home in homes if hasattr(home, "ALL_ATTENTION_FUNCTIONS"))
    function: Callable[..., Any] = home.ALL_ATTENTION_FUNCTIONS.get_interface(name, home.eager_attention_forward)
    return function


def _visible(name: str, module: nn.Module, query: Tensor, mask: Any, keywords: dict[str, Any]) -> Tensor | None:
    """The mask of an attention function as `QKV.mask`."""
    is_read = mask is None or (isinstance(mask, Tensor) and mask.ndim == 4)
    is_read &= keywords.get("cu_seq_lens_q") is None  # by which flash attention keeps documents apart
    if not is_read or keywords.get("position_bias") is not None:
        raise ValueError(
            f"{type(module).__name__} with attn_implementation={name} masks its scores, or adds to them, in a way that "
            "is not understood: choose a model that attends with sdpa"
        )
    if mask is None:
        # SDPA reads no mask as a causal one where the module sets is_causal; eager attention does not.
        causal = keywords.get("is_causal")
        if name == "eager" or not (getattr(module, "is_causal", True) if causal is None else causal):
            return None
        size = query.shape[2]
        return torch.ones(size, size, dtype=torch.bool, device=query.device).tril()[None, None]
    return mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
