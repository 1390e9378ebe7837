"""Reads the tensors of a checkpoint where a model is divided between ranks, or the files are."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from distill.distributed.parts import load_parts, template
from distill.runs.checkpoint_record import OPTIMIZER, WEIGHTS, check_weights
from distill.runtime.errors import Damaged

Tensors = dict[str, torch.Tensor]


def read_parts(
    path: Path, record: dict[str, Any], model: Tensors, check_slots: Callable[[Iterable[str]], None]
) -> tuple[Tensors, Tensors]:
    """Weights, and what an optimizer kept: of each tensor this rank's part, however many ranks have written it.

    Args:
        model: the weights that they are for, by name.
        check_slots: raises SettingError where a name is not one of this optimizer.

    Raises:
        Damaged: tensors are missing.
        SettingError: they belong to another model or optimizer.
    """
    described = {name: record["tensors"].get(name, {}) for name in (WEIGHTS, OPTIMIZER)}
    check_weights(path, described[WEIGHTS], model)
    check_slots({*described[OPTIMIZER], *record["optimizer"]})
    weights = {name: template(described[WEIGHTS][name], tensor) for name, tensor in model.items()}
    slots = {
        name: template(text, model.get(name.rpartition("//")[0], torch.empty(0)))
        for name, text in described[OPTIMIZER].items()
    }
    try:
        load_parts(path, {**weights, **slots})
    except ValueError as error:
        raise Damaged(path, f"its tensors do not load: {error}") from None
    return weights, slots
