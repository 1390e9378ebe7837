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
        """`betas`: decay of the means of the gradient and of its square. `eps`: is added to the root of the latter.

        `weight_decay`: fraction of a weight that a step takes off, times the learning rate. It is that of groups which
        have none of their own, as those of biases and norms have.

        Raises:
            ValueError: a value out of range.
        """
        check_settings(betas, eps, weight_decay)
        super().__init__(params, lr=lr, betas=(betas[0], betas[1]), eps=eps, weight_decay=weight_decay, fused=True)
