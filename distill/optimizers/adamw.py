"""AdamW (Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2019) in torch's fused kernel."""

import math
from typing import Any

import torch


class Adamw(torch.optim.AdamW):
    """torch's own, with the defaults of DistilBERT's training."""

    def __init__(
        self,
        params: Any,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.98),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
    ) -> None:
        """`weight_decay`: share of a weight that a step takes off, times the learning rate, where a group has no own.

        Raises:
            ValueError: a value out of range.
        """
        if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas={list(betas)} must be two numbers that are at least 0 and below 1")
        if not 0 < eps < math.inf:
            raise ValueError(f"eps={eps} must be above 0 and finite")
        if not 0 <= weight_decay < math.inf:
            raise ValueError(f"weight_decay={weight_decay} must be at least 0 and finite")
        super().__init__(params, lr=lr, betas=(betas[0], betas[1]), eps=eps, weight_decay=weight_decay, fused=True)
