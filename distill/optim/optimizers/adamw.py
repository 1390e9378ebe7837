"""AdamW (Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2019) in torch's fused kernel."""

from typing import Any

import torch

from distill.optim.optimizers import check_settings


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
        """`weight_decay`: fraction of a weight that a step takes off, times the learning rate, where a group has none.

        Raises:
            ValueError: a value out of range.
        """
        check_settings(betas, eps, weight_decay)
        super().__init__(params, lr=lr, betas=(betas[0], betas[1]), eps=eps, weight_decay=weight_decay, fused=True)
