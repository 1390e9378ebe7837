"""Models by a callable of the user's: any module with the interface of `protocol.TextModel`."""

import copy
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_model
from torch import nn
from transformers import PreTrainedTokenizerBase

from distill.config.component import Component
from distill.models.kernels.attention import keep_soft_cap
from distill.models.kind import MASKED, ModelKind, refuse_other_kind
from distill.models.load import check_tokenizer, model_folder
from distill.models.ties import settle_ties
from distill.models.wrappers import refuse_unread, unwrapped
from distill.runtime.errors import SettingError, first_line

WEIGHTS = "model.safetensors"


def custom_model(make: Component, path: str | None, kind: ModelKind = MASKED, **context: Any) -> Any:
    """The module that `_target_` gives. Where it does not take `path` itself, its weights are read from that folder.

    Args:
        kind: what it has to be; one of transformers that is fine-tuned gets the names of the classes.
        context: what the callable is given if it takes it.

    Raises:
        SettingError: it gives no module, or the weights do not fit it.
    """
    model = make(**context)
    if not isinstance(model, nn.Module):
        raise SettingError(f"{make.setting}._target_={make.path} gives a {type(model).__name__}, not a torch module")
    model = unwrapped(model, make.setting, learns=make.setting == "student")
    refuse_unread(model, make.setting)
    if path is not None and "path" not in make.takes():
        load_weights(model, f"{make.setting}.path", path)
    settle_ties(model)
    keep_soft_cap(model)
    if make.in_memory is not None and not kind.vocabulary:
        _name_classes(model, make.setting, kind)
    return model.float()


def _name_classes(model: Any, setting: str, kind: ModelKind) -> None:
    """Give a model of transformers the names of the classes. Raises SettingError where its head has other ones."""
    config = copy.deepcopy(getattr(model, "config", None))
    if config is None:
        return
    config.update({"architectures": [type(model).__name__]})
    refuse_other_kind(setting, config, kind)
    model.config.update(kind.fields)


def tokenizer_in_memory(make: Component, kind: ModelKind) -> PreTrainedTokenizerBase | None:
    """The tokenizer that came with a model in memory, or None. Raises SettingError for one that is unfit."""
    if make.in_memory is None or make.in_memory.tokenizer is None:
        return None
    tokenizer: PreTrainedTokenizerBase = make.in_memory.tokenizer
    check_tokenizer(f"{make.setting}.tokenizer", type(tokenizer).__name__, tokenizer, kind)
    return tokenizer


def load_weights(model: nn.Module, setting: str, path: str) -> None:
    """Read the weights of a saved model, or of the student of a run, into `model`.

    Raises:
        SettingError: there are none, or they are another model's.
    """
    file = Path(model_folder(path)) / WEIGHTS
    try:
        load_model(model, file)
    except (OSError, RuntimeError, SafetensorError) as error:
        raise SettingError(
            f"{setting}={path}: {file.name} does not fit a {type(model).__name__} ({first_line(error)}): give weights "
            "that this class has saved"
        ) from error
