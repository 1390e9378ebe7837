"""The MLPs in a model's blocks: the projection that ends them, and fewer of their neurons."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from distill.models.blocks import block_list, depth_of

# Names in blocks of transformers of the projection that ends an MLP, and in configurations of its width.
PROJECTIONS = (
    "output.dense", "ffn.lin2", "mlp.down_proj", "mlp.c_proj", "mlp.Wo", "mlp.dense_4h_to_h", "mlp.fc2", "fc2",
)  # fmt: skip
WIDTHS = ("intermediate_size", "n_inner", "hidden_dim", "ffn_dim")


def projection_of(block: Any) -> str | None:
    """The name in a block of the projection that ends its MLP; None where it is not known."""
    modules = dict(block.named_modules())
    return next((name for name in PROJECTIONS if isinstance(modules.get(name), nn.Linear | Conv1D)), None)


def weight_of(projection: Any) -> Tensor:
    """[F, H]: a row for each neuron that it reads."""
    weight: Tensor = projection.weight
    return weight if isinstance(projection, Conv1D) else weight.T


def projected(name: str, projection: Any, weight: Tensor, bias: Tensor) -> dict[str, Tensor]:
    """The weights [F, H] and [1, H], or none, under the names and in the form of a projection."""
    weight = weight if isinstance(projection, Conv1D) else weight.T
    return {f"{name}.weight": weight} | ({f"{name}.bias": bias[0]} if len(bias) else {})


def width_of(model: Any) -> int | None:
    """The neurons F of each MLP; None where they are not known."""
    block = block_list(model.base_model, depth_of(model))[0]
    name = projection_of(block)
    return None if name is None else len(weight_of(block.get_submodule(name)))


def take_neurons(
    weights: Mapping[str, Tensor], like: Mapping[str, Tensor], kept: Tensor, width: int
) -> dict[str, Tensor]:
    """Weights by name with the neurons `kept` of so many, in the dimensions in which `like` has fewer.

    A matrix that holds an MLP's input beside its gate has twice as many rows.
    """
    taken = dict(weights)
    for name, weight in weights.items():
        shape = like[name].shape if name in like else weight.shape
        for dim, (have, want) in enumerate(zip(weight.shape, shape, strict=False)):
            parts = have // width
            if have != want and (have, want) == (parts * width, parts * len(kept)):
                rows = torch.cat([kept + part * width for part in range(parts)])
                taken[name] = taken[name].index_select(dim, rows.to(weight.device))
    return taken
