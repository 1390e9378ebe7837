"""Optimizers: one file each, found by its name as `optimizer.kind`.

An optimizer of your own is any callable that gives a `torch.optim.Optimizer`, named as `optimizer._target_`. It gets as
keyword arguments `params`, `lr` and the settings beside `_target_`. `params` is two groups of parameters: the matrices,
and biases and the gains of norms, whose group has `weight_decay` 0, and `adapt` False for optimizers that adapt the
length of a step to that of its parameter. Before each step the gradient is clipped and `lr` set in every group. What
the optimizer keeps from step to step belongs into its `state` and `param_groups`, as tensors and numbers: that is
what checkpoints hold.
"""
