"""Puts a sharded model together again, in the memory of rank 0's host, as the plain model that it was."""

import copy
from typing import Any

import torch
from torch import nn

from distill.distributed.shard import whole


def skeleton_of(model: Any) -> Any:
    """A copy of a model that is not sharded yet, without memory for its parameters; ties between them are kept."""
    without = {
        id(parameter): nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
        for parameter in model.parameters()
    }
    return copy.deepcopy(model, dict(without))


def empty_copy(skeleton: Any) -> Any:
    """Such a model with memory for its parameters, which are still to be read from somewhere."""
    filled = {
        id(empty): nn.Parameter(torch.empty_like(empty, device="cpu"), empty.requires_grad)
        for empty in skeleton.parameters()
    }
    return copy.deepcopy(skeleton, dict(filled))


@torch.no_grad()
def put_together(model: nn.Module, skeleton: Any, keep: bool) -> Any | None:
    """The model with the present weights; all ranks call it, and those with `keep` get one.

    The weights are gathered one after the other, so that a rank that keeps none never holds more than one of them
    whole.
    """
    gathered = {}
    for name, parameter in model.named_parameters():
        value = whole(parameter.detach())
        if keep:
            gathered[name] = value.to("cpu")
    if not keep:
        return None
    filled = {
        id(empty): nn.Parameter(gathered[name], empty.requires_grad) for name, empty in skeleton.named_parameters()
    }
    made = copy.deepcopy(skeleton, dict(filled))
    buffers = dict(made.named_buffers())
    for name, buffer in model.named_buffers():
        buffers[name].copy_(buffer)
    return made
