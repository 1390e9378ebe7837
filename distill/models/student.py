"""Make the student: from teacher layers, from a configuration, from a saved model, or by the user's function."""

import importlib
import inspect
import re
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, AutoModelForMaskedLM, PreTrainedModel, PreTrainedTokenizerBase

from distill.config import Student
from distill.errors import SettingError
from distill.models.initialisation import attend_to_neighbours
from distill.models.load import (
    check_family,
    check_tokenizers,
    first_line,
    load_pretrained,
    load_tokenizer,
    longest_row,
    position_offset,
)

LAYER = re.compile(r"^(.*?\.(?:layer|layers)\.)(\d+)(\..*)$")
NUM_LAYERS = ("num_hidden_layers", "n_layers")
# Every family names its dropout rates in its own way.
DROPOUTS = (
    "hidden_dropout_prob",
    "attention_probs_dropout_prob",
    "dropout",
    "attention_dropout",
    "embedding_dropout",
    "mlp_dropout",
)
# BERT's names -> DistilBERT's, in the order in which they are replaced.
BERT_TO_DISTILBERT = (
    ("bert.embeddings", "distilbert.embeddings"),
    ("bert.encoder.layer", "distilbert.transformer.layer"),
    ("attention.self.query", "attention.q_lin"),
    ("attention.self.key", "attention.k_lin"),
    ("attention.self.value", "attention.v_lin"),
    ("attention.output.dense", "attention.out_lin"),
    ("attention.output.LayerNorm", "sa_layer_norm"),
    ("intermediate.dense", "ffn.lin1"),
    ("output.dense", "ffn.lin2"),
    ("output.LayerNorm", "output_layer_norm"),
    ("cls.predictions.transform.dense", "vocab_transform"),
    ("cls.predictions.transform.LayerNorm", "vocab_layer_norm"),
    ("cls.predictions.decoder", "vocab_projector"),
    ("cls.predictions.bias", "vocab_projector.bias"),
)


def make_student(settings: Student, teacher: Any | None, tokenizer: PreTrainedTokenizerBase, length: int) -> Any:
    """The student in training mode, fp32. Random parts draw from torch's generator, which the caller has seeded.

    Raises:
        SettingError: a kind that is not known or needs what is not there, or rows too long for either model.
    """
    if settings.kind == "layers":
        model = _from_layers(settings, teacher)
    elif settings.kind == "config":
        model = _from_config(settings, tokenizer, length)
    elif settings.kind == "pretrained":
        model = _from_pretrained(settings, tokenizer)
    elif settings.kind == "custom":
        model = _from_function(settings, teacher, tokenizer)
    else:
        raise SettingError(
            f"student.kind={settings.kind} is not known: choose one of layers, config, pretrained, custom"
        )
    check_family(model, "student")
    for name, one in (("teacher", teacher), ("student", model)):
        if (limit := longest_row(one)) is not None and length > limit:
            raise SettingError(f"corpus.sequence_length={length} exceeds the {name}'s {limit} positions: lower it")
    return model.float().train()


def tokenizer_of(settings: Student) -> PreTrainedTokenizerBase | None:
    """The tokenizer that a saved student brings along."""
    if settings.kind != "pretrained":
        return None
    return load_tokenizer("student.path", _path(settings), trust_remote_code=settings.trust_remote_code)


def _from_layers(settings: Student, teacher: Any | None) -> Any:
    if teacher is None:
        raise SettingError(
            "student.kind=layers takes layers of a teacher, but teacher.kind=none: choose student.kind=config"
        )
    available = teacher.config.num_hidden_layers
    chosen = list(range(0, available, 2)) if settings.layers is None else settings.layers
    if not chosen or any(not 0 <= layer < available for layer in chosen):
        raise SettingError(f"student.layers={chosen}: the teacher has layers 0 to {available - 1}")
    family = teacher.config.model_type
    weights = _take_layers(teacher.state_dict(), chosen)
    if settings.architecture in ("same", family):
        config = teacher.config.to_dict()
        if config.get("layer_types"):
            config["layer_types"] = [config["layer_types"][layer] for layer in chosen]
    elif (family, settings.architecture) == ("bert", "distilbert"):
        config, weights = _bert_config_to_distilbert(teacher.config), _bert_to_distilbert(weights)
    else:
        raise SettingError(
            f"student.architecture={settings.architecture}: layers of {family} go into the same architecture"
            + (" or distilbert" if family == "bert" else "")
        )
    for name in NUM_LAYERS:
        if name in config:
            config[name] = len(chosen)
    model = _build(settings.architecture if settings.architecture != "same" else family, config, settings)
    try:
        missing, unexpected = model.load_state_dict(weights, strict=False)
    except RuntimeError as error:  # sizes differ
        raise SettingError(
            f"student.config={settings.config}: the teacher's layers do not fit another shape; leave its sizes alone"
        ) from error
    own = dict(model.named_parameters())  # tied weights once: their other names may be missing
    if wrong := [*unexpected, *(name for name in missing if name in own)]:
        raise SettingError(
            f"student.layers={chosen}: {wrong[0]} is in the teacher's layers or in the student's, not in both; keep "
            "layer 0 first and only there, and leave the layers' parts alone in student.config"
        )
    return model


def _take_layers(state: dict[str, torch.Tensor], chosen: list[int]) -> dict[str, torch.Tensor]:
    """Keep the chosen layers' tensors, numbered anew, and everything that belongs to no layer."""
    out = {name: tensor for name, tensor in state.items() if not LAYER.match(name)}
    for new, old in enumerate(chosen):
        for name, tensor in state.items():
            if (match := LAYER.match(name)) and int(match[2]) == old:
                out[f"{match[1]}{new}{match[3]}"] = tensor
    return out


def _bert_config_to_distilbert(bert: Any) -> dict[str, Any]:
    return {
        "vocab_size": bert.vocab_size,
        "dim": bert.hidden_size,
        "n_layers": bert.num_hidden_layers,
        "n_heads": bert.num_attention_heads,
        "hidden_dim": bert.intermediate_size,
        "max_position_embeddings": bert.max_position_embeddings,
        "activation": bert.hidden_act,
        "pad_token_id": bert.pad_token_id,
        "tie_word_embeddings": bert.tie_word_embeddings,
    }


def _bert_to_distilbert(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """BERT's weights under DistilBERT's names.

    DistilBERT has no segments: the embedding of segment 0, which BERT adds at every position, moves into the position
    embeddings, so that a student with all the layers computes exactly what the teacher does.
    """
    out = {}
    for name, tensor in state.items():
        if "token_type" in name or "pooler" in name or name.endswith("position_ids"):
            continue
        if name == "bert.embeddings.position_embeddings.weight":
            tensor = tensor + state["bert.embeddings.token_type_embeddings.weight"][0]
        for old, new in BERT_TO_DISTILBERT:
            name = name.replace(old, new)
        out[name] = tensor
    return out


def _from_config(settings: Student, tokenizer: PreTrainedTokenizerBase, length: int) -> Any:
    if settings.architecture == "same":
        raise SettingError(
            "student.architecture=same with student.kind=config: name a transformers model type, e.g. bert"
        )
    special = {
        f"{name}_token_id": getattr(tokenizer, f"{name}_token_id")
        for name in ("pad", "cls", "sep", "bos", "eos")
        if getattr(tokenizer, f"{name}_token_id") is not None
    }
    positions = length + position_offset(settings.architecture, tokenizer.pad_token_id)
    defaults = {"vocab_size": len(tokenizer), "max_position_embeddings": positions}
    model = _build(settings.architecture, {**special, **defaults}, settings)
    if settings.start == "neighbours":
        attend_to_neighbours(model)
    return model


def _build(architecture: str, config: dict[str, Any], settings: Student) -> Any:
    """A new model of a transformers family; `student.config` and `student.dropout` have the last word."""
    try:
        known = AutoConfig.for_model(architecture)
    except ValueError as error:
        raise SettingError(f"student.architecture={architecture} is no transformers model type") from error
    unknown = [name for name in settings.config if not hasattr(known, name)]
    if unknown:
        raise SettingError(f"student.config.{unknown[0]} is no field of the {architecture} configuration")
    dropout = {name: settings.dropout for name in DROPOUTS if hasattr(known, name)}
    fields = {**config, **dropout, **settings.config}
    fields.pop("model_type", None)
    try:
        return AutoModelForMaskedLM.from_config(AutoConfig.for_model(architecture, **fields), dtype=torch.float32)
    except (ValueError, TypeError, StrictDataclassError) as error:
        raise SettingError(
            f"student.architecture={architecture} with student.config={settings.config}: {first_line(error)}"
        ) from error


def _path(settings: Student) -> str:
    if settings.path is None:
        raise SettingError("student.path=null with student.kind=pretrained: give a folder or a name on the Hub")
    return settings.path


def _from_pretrained(settings: Student, tokenizer: PreTrainedTokenizerBase) -> Any:
    own = tokenizer_of(settings)
    assert own is not None
    check_tokenizers(tokenizer, own, f"student.path={_path(settings)}")
    return load_pretrained("student.path", _path(settings), trust_remote_code=settings.trust_remote_code)


def _from_function(settings: Student, teacher: Any | None, tokenizer: PreTrainedTokenizerBase) -> Any:
    module, _, name = (settings.target or "").rpartition(".")
    try:
        make = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise SettingError(f"student.target={settings.target} cannot be imported: {error}") from error
    arguments = {"teacher": teacher, "tokenizer": tokenizer, **settings.arguments}
    try:
        inspect.signature(make).bind(**arguments)
    except TypeError as error:
        raise SettingError(f"student.arguments={settings.arguments} do not fit {settings.target}: {error}") from error
    model = make(**arguments)
    if not isinstance(model, PreTrainedModel):
        raise SettingError(f"student.target={settings.target} gives a {type(model).__name__}, not a transformers model")
    return model
