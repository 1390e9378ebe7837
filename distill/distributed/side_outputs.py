"""Lets a loss read tensors from inside of a block that is sharded over ranks."""

from typing import Any

import torch
from torch import Tensor


def join_outputs(output: Tensor, *inner: Tensor) -> tuple[Tensor, ...]:
    """The same tensors, for autograd one outcome: no gradient comes to the inner ones before one comes to the output.

    The weights of a sharded block are whole again once a gradient comes to its output. One that came to an inner
    tensor alone would meet parts of them.
    """
    joint: tuple[Tensor, ...] = _Joined.apply(output, *inner)
    return joint


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        return gradients
