"""AdamW with its no-decay group, and learning-rate schedules as pure functions of progress."""

import math

import torch
from torch import nn

from distill.config import Optimizer, Schedule


def build(model: nn.Module, settings: Optimizer) -> torch.optim.AdamW:
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


def factor(settings: Schedule, progress: float) -> float:
    """Share of `optimizer.lr` at `progress` in [0, 1] of the run: a linear rise, then the decay to `floor`."""
    if progress < settings.warmup:
        return progress / settings.warmup
    decay = (progress - settings.warmup) / max(1.0 - settings.warmup, 1e-12)
    if settings.kind == "linear":
        height = 1.0 - decay
    elif settings.kind == "cosine":
        height = 0.5 * (1.0 + math.cos(math.pi * decay))
    else:
        height = 1.0
    return settings.floor + (1.0 - settings.floor) * max(height, 0.0)


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr
