"""Dropout on the CPU: torch draws a random number for every value, here one of 64 bits decides for four."""

from typing import Any

import torch
from torch import Tensor, nn

LEVELS = 1 << 16  # 16 bits for each value: its probability is met to 8e-6


def draw_less(student: Any) -> None:
    """Give a student the dropout below in the place of torch's; its weights stay as they are."""
    for module in student.modules():
        for name, child in module.named_children():
            if type(child) is nn.Dropout:
                setattr(module, name, Dropout(child.p))


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
