"""AdamW with its no-decay group, and clipping."""

import torch
from torch import nn

from distill.config import OptimizerConfig


def build(model: nn.Module, settings: OptimizerConfig) -> torch.optim.AdamW:
    """Weight decay acts on matrices (embeddings included); biases and the gains of norms are left alone."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        groups, lr=settings.lr, betas=(settings.betas[0], settings.betas[1]), eps=settings.eps, fused=True
    )


def clip(model: nn.Module, largest: float | None) -> torch.Tensor:
    """The norm of the whole gradient, which is scaled down to `largest` where that is given and exceeded."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients)
    if largest is not None:
        torch.nn.utils.clip_grads_with_norm_([p for p in model.parameters() if p.grad is not None], largest, norm)
    return norm


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr
