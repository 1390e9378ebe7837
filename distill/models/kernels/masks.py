"""Masks of attention for batches whose padding and documents are known, so that no forward asks its device for them.

transformers asks at each forward whether a padding mask has holes and whether positions start anew, to leave out a mask
that hides nothing. On a GPU each question waits until everything before it is computed. Here the collator has answered
both on the processor.

Shapes: B sequences, S positions.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, flash_attention_mask, sdpa_mask

PREFIX = "distill_"  # of the names, in transformers' lists, of attention that gets its masks from `known_mask`
NAME = PREFIX + "sdpa"
FLASH = "flash_attention"  # of the names of transformers' attention that takes no mask of positions


class Layout(NamedTuple):
    """What is known of a batch."""

    is_padded: bool
    positions: Tensor | None  # [B, S], which start anew with each document; None: one document a sequence

    def documents_apart(self, mask_function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """transformers' form of a mask, within each document alone, and by the places in it."""
        if (positions := self.positions) is None:
            return mask_function
        document = (torch.diff(positions, prepend=positions[:, :1] - 1, dim=-1) != 1).cumsum(-1)

        def mask(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            inside = mask_function(batch, head, positions[batch, query], positions[batch, key])
            return inside & (document[batch, query] == document[batch, key])

        return mask


_layout: ContextVar[Layout | None] = ContextVar("layout", default=None)


def use_known_masks(model: Any) -> None:
    """Let a model that attends by torch's SDPA, or by flash attention, get its masks from here; others are left."""
    if attention_of(model).startswith(FLASH):  # under its own name, by which transformers finds the kernel
        AttentionMaskInterface.register(attention_of(model), known_padding)
    if attention_of(model) == "sdpa":
        AttentionInterface.register(NAME, sdpa_attention_forward)
        AttentionMaskInterface.register(NAME, known_mask)
        model.set_attn_implementation(NAME)


def attention_of(model: Any) -> str:
    """The name of a model's attention in transformers' lists; empty for a module that is none of transformers'."""
    return getattr(getattr(model, "config", None), "_attn_implementation", None) or ""


def makes_known_masks(model: Any) -> bool:
    """Whether the masks of a model come from here, also while its attention is recorded."""
    name = attention_of(model)
    return name.startswith(PREFIX) or ALL_MASK_ATTENTION_FUNCTIONS.get(name) is known_padding


def document_bounds(model: Any, lengths: Tensor | None, longest: int) -> dict[str, Any]:
    """Arguments by which flash attention keeps documents of these lengths [D] apart, of all sequences in one row.

    None for other attention, which has a mask. transformers makes them of the positions itself, but of a batch of one
    sequence alone: of more it lets documents see each other.
    """
    if lengths is None or not attention_of(model).startswith(FLASH):
        return {}
    bounds = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
    return {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": longest, "max_length_k": longest}


@contextmanager
def layout_known(layout: Layout) -> Iterator[None]:
    """While it is open `known_mask` makes the masks of batches with this layout."""
    token = _layout.set(layout)
    try:
        yield
    finally:
        _layout.reset(token)


def known_mask(
    *,
    kv_length: int,
    mask_function: Callable[..., Tensor],
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    **named: Any,
) -> Tensor | None:
    """transformers' mask function: bool [B, 1, S, S], or None where SDPA needs none, as `sdpa_mask` would decide.

    Outside of `layout_known`, as where text is generated, it is `sdpa_mask`.
    """
    arguments = {"kv_length": kv_length, "local_size": local_size, **named}
    if (layout := _layout.get()) is None:
        return sdpa_mask(mask_function=mask_function, attention_mask=attention_mask, **arguments)
    may_skip = named.get("allow_is_causal_skip", True) or named.get("allow_is_bidirectional_skip", False)
    hides_nothing = not layout.is_padded and layout.positions is None
    if may_skip and hides_nothing and (local_size is None or kv_length < local_size):
        return None
    arguments |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    padding = attention_mask if layout.is_padded else None
    return sdpa_mask(mask_function=layout.documents_apart(mask_function), attention_mask=padding, **arguments)


def known_padding(*, attention_mask: Tensor | None = None, **named: Any) -> Tensor | None:
    """transformers' mask function for flash attention: [B, S], or None where nothing is padding or bounds are given."""
    if (layout := _layout.get()) is None:
        return flash_attention_mask(attention_mask=attention_mask, **named)
    return attention_mask if layout.is_padded else None
