"""Models in memory: loaded with their tokenizers, taken from a program and out of wrappers, or made by a callable."""

import copy
import hashlib
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_model as load_weights_of
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DataParallel, DistributedDataParallel
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from distill.config.component import Component
from distill.data.disk_cache import folder_of, once_with_digest
from distill.distributed.mapped import release
from distill.distributed.shard import is_sharded
from distill.models.check import check_finite, check_vocabulary, max_positions, set_padding
from distill.models.kind import KINDS, MASKED, ORDERED, ModelKind, kind_in_memory, refuse_other_kind, saved_class
from distill.models.load import (
    check_tokenizer,
    load_pretrained,
    load_tokenizer,
    model_folder,
    refuse_custom_class,
    saved_config,
)
from distill.models.weights import keep_soft_cap, settle_ties, size
from distill.runtime.errors import SettingError, first_line, raising_at_the_call
from distill.runtime.files import read_settings

Held = tuple[Any, PreTrainedTokenizerBase]  # a model of transformers in memory and its tokenizer
SETTING = "model"  # what error lines call the path of a model that is loaded by itself
WEIGHTS = "model.safetensors"
COMPILED = "_orig_mod"  # what torch.compile calls the module in its own, whose class takes a second to import


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
        if (kind := kind_in_memory(model)) is None:
            raise _unread(model, name)
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
    model = load_pretrained(setting, str(path), kind).requires_grad_(False).eval()
    tokenizer = load_tokenizer(setting, str(path), kind)
    check_vocabulary(model, f"{setting}={path}", tokenizer)
    set_padding(model, tokenizer)
    return LoadedModel(model.to(target_device), tokenizer, kind, str(path), corpus_of(path))


def as_loaded(model: "str | Path | LoadedModel | Held", device: str = "auto") -> LoadedModel:
    """The model as it is where it is loaded already, also as (model, tokenizer); else load it by `load_model`."""
    held = in_memory(SETTING, model)
    return held if isinstance(held, LoadedModel) else load_model(held, device)


def in_memory(name: str, model: Any) -> Any:
    """A model in memory with its tokenizer, as one object; anything else as it is."""
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
    """
    refuse_custom_class(setting, path)
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


# --- models of a program


def unwrapped(model: Any, name: str, learns: bool = False) -> Any:
    """The model inside of torch.compile, DataParallel, DistributedDataParallel and PEFT; any other model as it is.

    What is given computes the same, and has its weights in common with the wrapper, but for PEFT's: adapters are merged
    into a copy, or, where the model `learns`, stay in the model and are what is trained of it.

    Args:
        name: what error lines call the model: teacher, student or model.
    """
    while True:
        if COMPILED in getattr(model, "_modules", {}):
            model = getattr(model, COMPILED)
        elif isinstance(model, DataParallel | DistributedDataParallel):
            model = model.module
        elif type(model).__module__.startswith("peft."):
            model = _without_peft(model, name, learns)
        else:
            break
    if not isinstance(model, nn.Module):
        return model
    if isinstance(model, FullyShardedDataParallel) or is_sharded(model):
        problem = f"each rank has a part of the weights of this {type(model).__name__}"
        cure = "give the model as it was before it was sharded; backend=fsdp shards it"
        raise SettingError(problem, setting=name, cure=cure)
    if model._compiled_call_impl is not None:  # by its own compile(); a copy has the same weights without that
        model = copy.copy(model)
    return model


def _without_peft(model: Any, name: str, learns: bool) -> Any:
    """The model of transformers in one of PEFT, with its adapters merged into a copy, or in place where it `learns`."""
    try:
        if learns and not model.active_peft_config.is_prompt_learning:
            return model.get_base_model()
        if not learns:
            return copy.deepcopy(model).merge_and_unload()
    except (AttributeError, NotImplementedError, ValueError, TypeError, RuntimeError):
        pass  # prompts, prefixes and other things that are no change of weights
    raise SettingError(
        f"what this {type(model).__name__} adds is no change of the model's weights",
        setting=name,
        cure="give its base model, model.get_base_model(), or one with adapters that can be merged, such as LoRA",
    )


def refuse_unread(model: Any, name: str) -> None:
    """Raises SettingError for a class of transformers itself that is of no kind that is read here."""
    is_theirs = isinstance(model, PreTrainedModel) and type(model).__module__.startswith("transformers.")
    if is_theirs and kind_in_memory(model) is None:
        raise _unread(model, name)


def _unread(model: Any, name: str) -> SettingError:
    return SettingError(
        f"a {type(model).__name__} has no head that is read here, so it predicts nothing",
        setting=name,
        cure="give a masked, causal, question answering or classification model of transformers",
    )


def custom_model(make: Component, path: str | None, kind: ModelKind = MASKED, **context: Any) -> Any:
    """The module that `_target_` gives. Where it does not take `path` itself, its weights are read from that folder.

    Args:
        kind: what it has to be; one of transformers that is fine-tuned gets the names of the classes.
        context: what the callable is given if it takes it.
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
    config = copy.deepcopy(getattr(model, "config", None))
    if make.in_memory is not None and not kind.vocabulary and config is not None:
        config.update({"architectures": [type(model).__name__]})
        refuse_other_kind(make.setting, config, kind)
        model.config.update(kind.fields)
    return model.float()


def tokenizer_in_memory(make: Component, kind: ModelKind) -> PreTrainedTokenizerBase | None:
    """The tokenizer that came with a model in memory, or None. Raises SettingError for one that is unfit."""
    if make.in_memory is None or make.in_memory.tokenizer is None:
        return None
    tokenizer: PreTrainedTokenizerBase = make.in_memory.tokenizer
    check_tokenizer(f"{make.setting}.tokenizer", type(tokenizer).__name__, tokenizer, kind)
    return tokenizer


def load_weights(model: nn.Module, setting: str, path: str) -> None:
    """Read the weights of a saved model, or of the student of a run, into `model`."""
    try:
        load_weights_of(model, Path(model_folder(path)) / WEIGHTS)
    except (OSError, RuntimeError, SafetensorError) as error:
        raise SettingError(
            f"{setting}={path}: {WEIGHTS} does not fit a {type(model).__name__} ({first_line(error)}): give weights "
            "that this class has saved"
        ) from error


# --- the identity of a model, wherever it lies


def model_digest(model: Any, tokenizer: PreTrainedTokenizerBase | None = None) -> str:
    """sha256 of a model's class, configuration and weights, and of the tokenizer's vocabulary."""
    digest = hashlib.sha256(_description(model).encode())
    for name, tensor in sorted(model.state_dict().items()):
        # As it is in training, whatever format it is saved in.
        value = tensor.detach().to("cpu", torch.float32 if tensor.is_floating_point() else None)
        digest.update(f"{name} {value.dtype} {list(value.shape)}".encode())
        digest.update(value.contiguous().reshape(-1).view(torch.uint8).numpy())
        release(tensor)
    if tokenizer is not None:
        digest.update(_tokenizer_text(tokenizer).encode())
    return digest.hexdigest()


def saved_digest(path: str, model: Any, tokenizer: PreTrainedTokenizerBase | None, cache: str) -> str:
    """`model_digest` of a model that was loaded from `path`.

    For a local folder it is kept in `cache`, beside names, sizes and times of the files that it was computed from.
    """
    folder = Path(model_folder(path))
    files = sorted(file for file in folder.glob("*") if file.is_file()) if folder.is_dir() else []
    if not files:
        return model_digest(model, tokenizer)
    # 3: of this function's outcome. A folder gives other models where it is read for another task.
    inputs: list[Any] = [3, _description(model), _tokenizer_text(tokenizer) if tokenizer is not None else ""]
    inputs += [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    cached = folder_of(cache, "digests", hashlib.sha256(repr(inputs).encode()).hexdigest()[:32])
    with once_with_digest(cached, quiet=True) as new:  # the ranks of a machine come at the same time
        if new is not None:
            new.write_text(model_digest(model, tokenizer) + "\n", encoding="utf-8")
    return cached.read_text(encoding="utf-8").strip()


def _description(model: Any) -> str:
    """Class and configuration of a model, without what depends on where it lies and how it was saved."""
    config: Any = getattr(model, "config", None)
    described = config.to_diff_dict() if hasattr(config, "to_diff_dict") else {}
    elsewhere = ("_name_or_path", "transformers_version", "dtype", "architectures")
    fields = {name: value for name, value in described.items() if name not in elsewhere}
    return json.dumps([type(model).__name__, fields], sort_keys=True, default=str)


def _tokenizer_text(tokenizer: PreTrainedTokenizerBase) -> str:
    """Everything that decides which ids a text gets, without padding and truncation that were left set."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return json.dumps(sorted(tokenizer.get_vocab().items()))
    return json.dumps(json.loads(backend.to_str()) | {"padding": None, "truncation": None}, sort_keys=True)
