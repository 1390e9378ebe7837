"""Loads a saved model with its tokenizer and the settings of the run that trained it."""

import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from distill.models.check import check_finite, check_vocabulary, max_positions, set_padding
from distill.models.kind import KINDS, MASKED, ORDERED, ModelKind, kind_in_memory, saved_class
from distill.models.load import (
    load_pretrained,
    load_tokenizer,
    model_folder,
    refuse_unfinished,
    saved_config,
    size,
)
from distill.models.modes import in_evaluation_mode
from distill.models.wrappers import refuse_unread, unwrapped
from distill.runtime.errors import SettingError, raising_at_the_call
from distill.runtime.files import read_settings

Held = tuple[Any, PreTrainedTokenizerBase]  # a model of transformers in memory and its tokenizer
SETTING = "model"  # what error lines call the path of a model that is loaded by itself


@dataclass(frozen=True, repr=False, eq=False)
class LoadedModel:
    """A model on its device and its tokenizer; in evaluation mode, but for the student of a pair.

    Attributes:
        model: of transformers, in fp32.
        tokenizer: a fast one.
        kind: masked, causal, for classes or for answers.
        path: where it was loaded from: a folder, or a name on the Hub; "" for one that was made in memory.
        corpus: the settings `corpus` of the run that trained it, such as `sequence_length`; else empty.
    """

    model: Any
    tokenizer: PreTrainedTokenizerBase
    kind: ModelKind
    path: str = ""
    corpus: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, model: Any, tokenizer: PreTrainedTokenizerBase, name: str = SETTING) -> "LoadedModel":
        """A transformers model that is in memory, without what is wrapped around it, as `unwrapped` has it.

        Args:
            name: what error lines call it; of a `teacher` adapters are merged into a copy.

        Raises:
            SettingError: it is of a kind that nothing here reads.
        """
        model = unwrapped(model, name, learns=name != "teacher")
        refuse_unread(model, name)
        if (kind := kind_in_memory(model)) is None:
            raise SettingError(
                f"a {type(model).__name__} is no masked, causal, question answering or classification model of "
                "transformers",
                setting=name,
                cure="give one that is",
            )
        check_finite(model, name)
        check_vocabulary(model, name, tokenizer)
        set_padding(model, tokenizer)
        return cls(model, tokenizer, kind)

    @property
    def device(self) -> torch.device:
        """The device that its weights are on."""
        device: torch.device = next(self.model.parameters()).device
        return device

    @property
    def num_parameters(self) -> int:
        """Tied ones count once."""
        return size(self.model)[0]

    @property
    def longest(self) -> int | None:
        """The maximum length of a sequence in tokens; None where its configuration sets no limit."""
        return max_positions(self.model)

    def evaluating(self) -> AbstractContextManager[Any]:
        """Gives the model in evaluation mode, and puts it back into the mode that it was in."""
        return in_evaluation_mode(self.model)

    def __repr__(self) -> str:
        origin = f" from {self.path}" if self.path else ""
        return f"{type(self.model).__name__}{origin}: {self.kind.noun}, {self.num_parameters:,} parameters"


@raising_at_the_call
def load_model(path: str | Path, device: str = "auto", setting: str = SETTING) -> LoadedModel:
    """Load a saved model and its tokenizer, in evaluation mode and fp32; code that comes with a model is never run.

    Args:
        path: a run folder, a snapshot, a model folder or a name on the Hub.
        device: auto (a GPU where there is one), cpu, cuda or cuda:NUMBER.
        setting: what error lines call the path.

    Raises:
        SettingError: there is no such model, or it is of an unsupported kind.
    """
    target_device = device_of(device)
    kind = kind_of(setting, str(path))
    with without_bars():
        model = load_pretrained(setting, str(path), kind).requires_grad_(False).eval()
    tokenizer = load_tokenizer(setting, str(path), kind)
    check_vocabulary(model, f"{setting}={path}", tokenizer)
    set_padding(model, tokenizer)
    return LoadedModel(model.to(target_device), tokenizer, kind, str(path), corpus_of(path))


@contextmanager
def without_bars() -> Iterator[None]:
    """Without transformers' bars, which show how the weights of a model are read."""
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()


def as_loaded(model: "str | Path | LoadedModel | Held", device: str = "auto") -> LoadedModel:
    """The model as it is where it is loaded already, also as (model, tokenizer); else load it by `load_model`."""
    held = in_memory(SETTING, model)
    return held if isinstance(held, LoadedModel) else load_model(held, device)


def in_memory(name: str, model: Any) -> Any:
    """A model in memory with its tokenizer, as one object; anything else as it is.

    Raises:
        SettingError: it has no tokenizer; the message calls it `name`.
    """
    if isinstance(model, nn.Module):
        raise SettingError(
            f"{name} is a {type(model).__name__} in memory, without its tokenizer: give (model, tokenizer)"
        )
    return LoadedModel.of(*model, name) if isinstance(model, tuple) and len(model) == 2 else model


def device_of(name: str) -> torch.device:
    """The device with this name. Raises SettingError where there is none."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if not (match := re.fullmatch(r"cpu|cuda(?::(0|[1-9]\d*))?", str(name))):
        raise SettingError(f"device={name}: give auto, cpu, cuda or cuda:NUMBER")
    if str(name) != "cpu" and int(match[1] or 0) >= torch.cuda.device_count():
        raise SettingError(f"device={name}: there are {torch.cuda.device_count()} GPUs here; give cpu")
    return torch.device(name)


def kind_of(setting: str, path: str) -> ModelKind:
    """The kind of a saved model, by the class that its configuration names.

    A model with a head for the order of segments beside that over the vocabulary is a masked one.

    Raises:
        SettingError: there is none, or of another class.
    """
    folder = Path(model_folder(path))
    refuse_unfinished(setting, path)
    if (folder / "model.safetensors").is_file() and not (folder / "config.json").is_file():
        raise SettingError(
            f"{setting}={path} holds the weights of a module of your own without the code that makes it: load it as "
            "the README.md beside the weights shows, and call it yourself"
        )
    config = saved_config(setting, path)
    saved = saved_class(config)
    for kind in KINDS:
        if saved in kind.classes(config.model_type):
            return MASKED if kind is ORDERED else kind
    raise SettingError(
        f"{setting}={path} is a {saved or config.model_type}: choose a masked, causal, question answering or "
        "classification model"
    )


def corpus_of(path: str | Path) -> dict[str, Any]:
    """The settings `corpus` of the run that a model comes from: of a run folder, the student in it, or a snapshot."""
    folder = Path(path).expanduser()
    for parent in (folder, folder.parent, folder.parent.parent):
        file = parent / "config.yaml"
        if file.is_file() and (parent / "metrics.jsonl").is_file():
            corpus = read_settings(file).get("corpus")
            return corpus if isinstance(corpus, dict) else {}
    return {}
