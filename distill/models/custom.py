"""Models by a callable of the user's: any module with the interface of `protocol.TextModel`."""

from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_model
from torch import nn

from distill.config.component import Component
from distill.models.fields import check_saved_sizes
from distill.models.load import model_folder
from distill.runtime.errors import SettingError, first_line

WEIGHTS = "model.safetensors"


def custom_model(make: Component, path: str | None, **context: Any) -> Any:
    """The module that `_target_` gives. Where it does not take `path` itself, its weights are read from that folder.

    Args:
        context: what the callable is given if it takes it.

    Raises:
        SettingError: it gives no module, or the weights do not fit it.
    """
    model = make(**context)
    if not isinstance(model, nn.Module):
        raise SettingError(f"{make.setting}._target_={make.path} gives a {type(model).__name__}, not a torch module")
    if type(model).__module__.startswith("peft."):
        raise SettingError(
            f"{make.setting}._target_={make.path} gives a {type(model).__name__} of PEFT, whose adapters no folder of "
            "a student keeps: give what its merge_and_unload() or its get_base_model() gives"
        )
    if path is not None and "path" not in make.takes():
        load_weights(model, f"{make.setting}.path", path)
    return model.float()


def load_weights(model: nn.Module, setting: str, path: str) -> None:
    """Read the weights of a saved model, or of the student of a run, into `model`.

    Raises:
        SettingError: there are none, or they are another model's.
    """
    file = Path(model_folder(path)) / WEIGHTS
    check_saved_sizes(setting, path, file.parent)
    try:
        load_model(model, file)
    except (OSError, RuntimeError, SafetensorError) as error:
        raise SettingError(
            f"{setting}={path}: {file.name} does not fit a {type(model).__name__}: {first_line(error)}"
        ) from error
