"""Finds a model's linear layers, whichever class they are of, and gives them as torch's own."""

from collections.abc import Iterator

from torch import nn
from transformers.pytorch_utils import Conv1D


def linear_layers(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Module, nn.Linear]]:
    """Every linear layer with its parent, its name there, and as an `nn.Linear` over the same memory.

    What inherits from a linear layer may compute something else, and is left out. The layers are listed before the
    first is given, so that the caller may replace them on the way.
    """
    children = [(parent, name, child) for parent in model.modules() for name, child in parent.named_children()]
    for parent, name, child in children:
        if type(child) is nn.Linear:
            yield parent, name, child, child
        elif type(child) is Conv1D:
            yield parent, name, child, _as_linear(child)


def _as_linear(layer: Conv1D) -> nn.Linear:
    """GPT-2's linear layers have their weight transposed: [in, out]."""
    size_in, size_out = layer.weight.shape
    made = nn.Linear(size_in, size_out, device="meta")  # draws no random numbers
    made.weight = nn.Parameter(layer.weight.detach().t(), requires_grad=False)
    made.bias = nn.Parameter(layer.bias.detach(), requires_grad=False)
    return made.train(layer.training)
