"""Activations that a model computes in many passes over memory, as one operator of torch: the same function."""

from typing import Any

from torch import nn
from transformers.activations import NewGELUActivation

from distill.models.kernels import FAMILIES, family_of


def use_one_gelu(model: Any) -> None:
    """Give a model of a known family torch's tanh approximation of GELU instead of transformers' formula for it.

    GPT-2 and ALBERT have it as eight operations, of which autograd keeps most for backward: three times as long.
    """
    if family_of(model) not in FAMILIES:
        return
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is NewGELUActivation:
                setattr(module, name, nn.GELU(approximate="tanh"))


def is_tanh_gelu(module: object) -> bool:
    return isinstance(module, nn.GELU) and module.approximate == "tanh"
