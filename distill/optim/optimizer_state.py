"""What an optimizer keeps from step to step, as checkpoints hold it: taken out, and put back."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from distill.runtime.errors import SettingError

SLOT = "//"  # between the name of a parameter or group and that of what is kept of it
GROUPS = "groups."  # before the number of a group of parameters
PART_OF = "part_of"  # of a group that is a further part of another one, whose numbers it has: that one's number


def optimizer_state(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[dict[str, torch.Tensor], dict[str, float | str | None]]:
    """What an optimizer keeps from step to step: tensors, and numbers, by `name//slot`.

    The name is that of the parameter, or `groups.N` for what a group of parameters keeps: its tensors and numbers. The
    rest of a group is settings.

    Raises:
        SettingError: it keeps something that is neither a tensor nor a number, or not of a parameter.
    """
    tensors: dict[str, torch.Tensor] = {}
    numbers: dict[str, float | str | None] = {}
    for name, slot, value in _slots(model, optimizer):
        if isinstance(value, torch.Tensor):
            tensors[f"{name}{SLOT}{slot}"] = value.detach()
        elif value is None or isinstance(value, int | float | str):
            numbers[f"{name}{SLOT}{slot}"] = value
        else:
            raise SettingError(
                f"the optimizer {type(optimizer).__name__} keeps a {type(value).__name__} as {slot!r} of a parameter, "
                "but checkpoints hold tensors and numbers alone: keep it as such"
            )
    return tensors, numbers


def _slots(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, str, Any]]:
    """Owner, slot and value of all that the optimizer keeps."""
    names: dict[Any, str] = {parameter: name for name, parameter in model.named_parameters()}
    for parameter, slots in optimizer.state.items():
        if parameter not in names:
            raise SettingError(
                f"the optimizer {type(optimizer).__name__} keeps {str(parameter)[:40]!r} in its state, which is no "
                "parameter, and checkpoints would lose it: keep it with the parameters, or in param_groups"
            )
        yield from ((names[parameter], slot, value) for slot, value in slots.items())
    for number, group in enumerate(optimizer.param_groups):
        for slot, value in group.items() if PART_OF not in group else ():
            if isinstance(value, torch.Tensor | int | float):
                yield f"{GROUPS}{number}", slot, value


def _parts_of(optimizer: torch.optim.Optimizer, number: int) -> list[dict[str, Any]]:
    """The group of this number, and the groups that are further parts of it."""
    groups = optimizer.param_groups
    return [groups[number], *(group for group in groups if group.get(PART_OF) == number)]


def has_slot(model: nn.Module, optimizer: torch.optim.Optimizer, key: str) -> bool:
    """Whether this `name//slot` is of a group or a parameter of the optimizer, whose class a user may have edited."""
    name, groups = key.rpartition(SLOT)[0], optimizer.param_groups
    if name.startswith(GROUPS):
        return int(name.removeprefix(GROUPS)) < len(groups)
    parameter = dict(model.named_parameters()).get(name)
    return any(parameter is one for group in groups for one in group["params"])


def restore_optimizer(
    model: nn.Module, optimizer: torch.optim.Optimizer, tensors: dict[str, torch.Tensor], numbers: dict[str, Any]
) -> None:
    parameters = dict(model.named_parameters())
    indices: dict[torch.Tensor, int] = {}
    for group, saved in zip(optimizer.param_groups, optimizer.state_dict()["param_groups"], strict=True):
        indices |= dict(zip(group["params"], saved["params"], strict=True))
    state: dict[int, dict[str, Any]] = {}
    for key, value in {**tensors, **numbers}.items():
        name, slot = key.rsplit(SLOT, 1)
        if name.startswith(GROUPS):
            number = int(name.removeprefix(GROUPS))
            for group in _parts_of(optimizer, number):
                if isinstance(value, torch.Tensor):
                    beside = (group.get(slot), next(iter(group["params"]), None))
                    value = value.to(next((one.device for one in beside if isinstance(one, torch.Tensor)), "cpu"))
                group[slot] = value
        else:
            state.setdefault(indices[parameters[name]], {})[slot] = value
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
    # torch has moved each tensor to where it belongs, but also turned it into the number format of its parameter.
    for key, value in tensors.items():
        name, slot = key.rsplit(SLOT, 1)
        if not name.startswith(GROUPS):
            slots = optimizer.state[parameters[name]]
            slots[slot] = value.to(slots[slot].device) if slots[slot].dtype != value.dtype else slots[slot]
