"""Optimizers: one file each, found by its name as `optimizer.kind`.

An optimizer of your own is any callable that gives a `torch.optim.Optimizer`, named as `optimizer._target_`. It gets as
keyword arguments `params`, `lr` and the settings beside `_target_`. `params` is two groups of parameters: the matrices,
and biases and the gains of norms, whose group has `weight_decay` 0, and `adapt` False for optimizers that adapt the
length of a step to that of its parameter. Before each step the gradient is clipped and `lr` set in every group; where
the groups that the callable makes have different rates, each keeps its ratio to `lr`. What the optimizer keeps from
step to step belongs into its `state` and `param_groups`, as tensors and numbers: that is what checkpoints hold.
"""

import math


def check_settings(betas: tuple[float, float], eps: float, weight_decay: float) -> None:
    """Raises ValueError, naming the setting, for values that no optimizer in the manner of Adam can have."""
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise ValueError(f"betas={list(betas)} must be two numbers that are at least 0 and below 1")
    if not 0 < eps < math.inf:
        raise ValueError(f"eps={eps} must be above 0 and finite")
    if not 0 <= weight_decay < math.inf:
        raise ValueError(f"weight_decay={weight_decay} must be at least 0 and finite")
