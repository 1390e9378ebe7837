"""A student's dropout and attention on the CPU: a quarter of torch's random numbers, and no fp32 detour.

Torch draws one number for every value that dropout may drop; here one of 64 bits decides for four values. And where
torch's SDPA drops attention weights, or goes backward in bf16, it does so on the CPU in fp32 or in kernels that are
slower than the batched products below.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from distill.config import Precision
from distill.models import TRANSFORMS

NAME = "batched_products"  # of `attention`, in transformers' list
LEVELS = 1 << 16  # 16 bits for each value: its probability is met to 8e-6


def lighten(student: Any, precision: Precision, device: torch.device) -> None:
    """Give `student` the dropout and attention below, where it will train on the CPU. Its weights stay as they are.

    Families that are not known keep what they have, and so does what torch.compile makes kernels of.
    """
    if device.type != "cpu" or precision.compile or getattr(student.config, "model_type", None) not in TRANSFORMS:
        return
    for module in student.modules():
        for name, child in module.named_children():
            if type(child) is nn.Dropout:
                setattr(module, name, Dropout(child.p))
    if student.config._attn_implementation == "sdpa":
        AttentionInterface.register(NAME, attention)
        AttentionMaskInterface.register(NAME, sdpa_mask)
        student.set_attn_implementation(NAME)


class Dropout(nn.Dropout):
    """As torch's, with `factors`."""

    def forward(self, x: Tensor) -> Tensor:
        return x * factors(x, self.p) if self.training and self.p > 0 else x


def factors(x: Tensor, p: float) -> Tensor:
    """What dropout multiplies `x` by, in its shape and dtype: 0 with probability `p`, else what keeps the mean."""
    dropped = round(p * LEVELS)
    if dropped == LEVELS:
        return torch.zeros_like(x)
    words = torch.empty(-(-x.numel() // 4), dtype=torch.int64).random_(-(2**63), None)  # all 64 bits
    levels = words.view(torch.int16)[: x.numel()].view(x.shape)
    return (levels >= dropped - LEVELS // 2).to(x.dtype).mul_(LEVELS / (LEVELS - dropped))


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
    """
    trains_in_bf16 = query.dtype == torch.bfloat16 and torch.is_grad_enabled()
    if dropout == 0 and not trains_in_bf16:
        return sdpa_attention_forward(module, query, key, value, attention_mask, 0.0, scaling, **others)
    scale = 1 / math.sqrt(query.shape[-1]) if scaling is None else scaling
    with torch.autocast(query.device.type, enabled=False):  # it would take the scores to fp32 and back
        scores = (query * scale) @ key.mT
        if attention_mask is not None:
            if attention_mask.dtype == torch.bool:
                # Not -inf: padding may have nowhere to look, and then would be nan.
                scores = scores.masked_fill(~attention_mask, torch.finfo(scores.dtype).min)
            else:
                scores = scores + attention_mask
        weights = scores.softmax(-1)
        if dropout > 0:
            weights = weights * factors(weights, dropout)
        return (weights @ value).transpose(1, 2).contiguous(), None
