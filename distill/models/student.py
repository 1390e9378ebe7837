"""Make the student: from teacher layers, from a configuration, from a saved model, or by the user's callable."""

from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, AutoModelForMaskedLM, PreTrainedModel, PreTrainedTokenizerBase

from distill.config import StudentConfig
from distill.errors import SettingError
from distill.models.from_layers import chosen_layers, copy_layers, student_fields
from distill.models.initialisation import attend_to_neighbours
from distill.models.load import (
    check_model,
    check_tokenizers,
    first_line,
    load_pretrained,
    load_tokenizer,
    longest_row,
    position_offset,
)

# Every family names its dropout rates in its own way.
DROPOUTS = (
    "hidden_dropout_prob",
    "attention_probs_dropout_prob",
    "dropout",
    "attention_dropout",
    "embedding_dropout",
    "mlp_dropout",
)


def make_student(settings: StudentConfig, teacher: Any | None, tokenizer: PreTrainedTokenizerBase, length: int) -> Any:
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
        model = _custom(settings, teacher, tokenizer, length)
    else:
        raise SettingError(
            f"student.kind={settings.kind} is not known: choose one of layers, config, pretrained, custom"
        )
    check_model(model, "student")
    for name, one in (("teacher", teacher), ("student", model)):
        if (limit := longest_row(one)) is not None and length > limit:
            raise SettingError(f"corpus.sequence_length={length} exceeds the {name}'s {limit} positions: lower it")
    return model.float().train()


def tokenizer_of(settings: StudentConfig) -> PreTrainedTokenizerBase | None:
    """The tokenizer that a saved student brings along."""
    if settings.kind != "pretrained":
        return None
    return load_tokenizer("student.path", _path(settings), trust_remote_code=settings.trust_remote_code)


def _from_layers(settings: StudentConfig, teacher: Any | None) -> Any:
    if teacher is None:
        raise SettingError(
            "student.kind=layers takes layers of a teacher, but teacher.kind=none: choose student.kind=config"
        )
    chosen = chosen_layers(settings, teacher.config.num_hidden_layers)
    family = teacher.config.model_type
    architecture = family if settings.architecture == "same" else settings.architecture
    model = _build(architecture, student_fields(settings, teacher, chosen), settings)
    copy_layers(settings, teacher, model, chosen)
    return model


def _from_config(settings: StudentConfig, tokenizer: PreTrainedTokenizerBase, length: int) -> Any:
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


def _build(architecture: str, config: dict[str, Any], settings: StudentConfig) -> Any:
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


def _path(settings: StudentConfig) -> str:
    if settings.path is None:
        raise SettingError("student.path=null with student.kind=pretrained: give a folder or a name on the Hub")
    return settings.path


def _from_pretrained(settings: StudentConfig, tokenizer: PreTrainedTokenizerBase) -> Any:
    own = tokenizer_of(settings)
    assert own is not None
    check_tokenizers(tokenizer, own, f"student.path={_path(settings)}")
    return load_pretrained("student.path", _path(settings), trust_remote_code=settings.trust_remote_code)


def _custom(settings: StudentConfig, teacher: Any | None, tokenizer: PreTrainedTokenizerBase, length: int) -> Any:
    assert settings.custom is not None
    model = settings.custom(teacher=teacher, tokenizer=tokenizer, sequence_length=length)
    if not isinstance(model, PreTrainedModel):
        raise SettingError(
            f"student._target_={settings.custom.path} gives a {type(model).__name__}, not a transformers model"
        )
    return model
