"""Make the student: from teacher layers, from a configuration, from a saved model, or by the user's callable."""

import copy
import logging
import math
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedModel, PreTrainedTokenizerBase

from distill.config.settings import StudentConfig
from distill.distributed.mapped import new_parameters_take_memory, parameters_on_meta
from distill.models.blocks import freeze, require_blocks
from distill.models.check import (
    check_length,
    check_model,
    check_positions,
    check_tokenizers,
    position_offset,
    require_memory_for_weights,
)
from distill.models.kind import MASKED, ModelKind, refuse_other_kind
from distill.models.layers import AUTO, RULES, choose_layers, copy_layers, student_fields
from distill.models.load import HubOptions, load_pretrained, load_tokenizer, model_folder
from distill.models.loaded import custom_model, tokenizer_in_memory
from distill.models.weights import keep_soft_cap, refuse_tying
from distill.runtime.errors import SettingError, did_you_mean, first_line

logger = logging.getLogger(__name__)

DROPOUT = 0.1  # of models that are made here, unless another is given
# What the families of transformers raise for sizes that do not fit each other.
UNFIT = (ValueError, TypeError, AssertionError, ArithmeticError, LookupError, AttributeError, RuntimeError)
# Endings of whole numbers that are no sizes, and a size that may be 0.
NO_SIZES = ("_id", "_ids", "type_vocab_size")
# Rates of parts that no language model trains, but for the first where there is a head on whole sequences.
OTHER_DROPOUTS = ("classifier", "cls_", "summary", "pooler", "layerdrop", "drop_path", "stochastic_depth")

GAIN = 1.5  # of queries and keys: the neighbour's weight stands out from the noise of the tokens
FIRST_ATTENTION = {  # of a base model
    "bert": "encoder.layer.0.attention.self",
    "distilbert": "transformer.layer.0.attention",
    "albert": "encoder.albert_layer_groups.0.albert_layers.0.attention",
}


def dropout_names(config: Any, kind: ModelKind = MASKED) -> list[str]:
    """The dropout rates of a transformers configuration: every family has names of its own for them."""
    others = [name for name in OTHER_DROPOUTS if not (kind.heads and name == "classifier")]
    return [
        name
        for name, value in vars(config).items()
        if "dropout" in name or name.endswith("_pdrop")
        if isinstance(value, int | float) and not isinstance(value, bool)
        if not any(other in name for other in others)
    ]


def make_student(
    settings: StudentConfig,
    teacher: Any | None,
    tokenizer: PreTrainedTokenizerBase,
    length: int,
    kind: ModelKind = MASKED,
    mapped: bool = False,
    reads_head: bool = True,
) -> Any:
    """The student in training mode, fp32. Random parts draw from torch's generator, which the caller has seeded.

    Args:
        reads_head: whether a loss reads its head over the vocabulary; else a saved one may be an encoder without.
        mapped: its weights are those of files, in their format and as windows on them, where it takes them from there;
            `check_student` is then left to the caller, once the student is sharded over ranks.
    """
    if (make := settings.custom) is not None:
        context = {"teacher": teacher, "tokenizer": tokenizer, "sequence_length": length}
        model = custom_model(make, settings.path, kind, **context)
        for weight in model.parameters():  # optimizers and files take a weight row by row, a part of another too
            weight.data = weight.data.contiguous()
    elif settings.from_layers:
        model = _from_layers(settings, teacher, kind, mapped)
    elif settings.is_new:
        model = _from_config(settings, tokenizer, length, kind)
    else:
        model = _from_pretrained(settings, tokenizer, kind, mapped, reads_head)
    keep_soft_cap(model)
    check_positions(model, "student", length)
    if settings.gradient_checkpointing:
        require_blocks(model)
    if make is None:
        freeze(model, settings.frozen)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        where = f"student.frozen={settings.frozen}" if make is None else f"student._target_={make.path}"
        raise SettingError(
            f"{where}: no weight of the student is trained: freeze less of it, or call requires_grad_(True)"
        )
    if mapped:
        return model.train()
    check_student(model, length, kind)
    return model.float().train()


def check_student(model: Any, length: int, kind: ModelKind) -> None:
    """Raises SettingError for a student that is read wrongly, or cannot read sequences of this length."""
    check_model(model, "student", kind)
    check_length(model, "student", length)


def tokenizer_of(settings: StudentConfig, kind: ModelKind = MASKED) -> PreTrainedTokenizerBase | None:
    """The tokenizer that `student.tokenizer` names, or that a saved student brings along; None: it has none."""
    if settings.tokenizer is not None:
        return load_tokenizer("student.tokenizer", settings.tokenizer, kind)
    if (make := settings.custom) is not None:
        return tokenizer_in_memory(make, kind)
    if not settings.is_saved:
        return None
    return load_tokenizer("student.path", _path(settings), kind, HubOptions(None, settings.trust_remote_code))


def _from_layers(settings: StudentConfig, teacher: Any | None, kind: ModelKind, mapped: bool) -> Any:
    if teacher is None:
        raise SettingError(
            "student.init=layers takes layers of a teacher, but teacher.path=null: name one, as in "
            "teacher=bundled_deep or teacher=pretrained teacher.path=FOLDER, or choose student.init=random, which "
            "starts from new weights"
        )
    if not isinstance(teacher, PreTrainedModel):
        raise SettingError(
            f"student.init=layers takes layers of a transformers model, and the teacher is a {type(teacher).__name__}: "
            "build the student in a function of your own, student=custom student._target_=..."
        )
    available, layers, refusal = teacher.config.num_hidden_layers, settings.layers, None
    # For layers that are to be found yet, from those of the first rule that fits: where a layer's number decides its
    # kind, few choices do.
    for rule in (AUTO, *RULES) if layers == AUTO else (layers,):
        chosen = choose_layers(rule, settings.num_layers, available)
        try:
            model = from_layers(settings, teacher, chosen, kind, mapped)
        except SettingError as error:
            refusal = refusal or error
            continue
        if layers != AUTO and not settings.refit and settings.intermediate_size is None:  # else it is made once more
            logger.info(f"the student starts from layers {chosen} of the teacher's {available}")
        return model
    assert refusal is not None
    raise refusal


def from_layers(settings: StudentConfig, teacher: Any, chosen: list[int], kind: ModelKind, alias: bool) -> Any:
    """A student that starts from these layers of a transformers model.

    Args:
        alias: let it have the teacher's tensors themselves; before training they have to be copied.
    """
    refuse_tying(settings.config, teacher, "the teacher")
    fields = student_fields(settings, teacher, chosen)
    with parameters_on_meta() if alias else nullcontext():
        if settings.architecture not in ("same", teacher.config.model_type):
            model = _of_family(settings.architecture, fields, settings, kind)
        else:  # of the teacher's own class, which need not be registered with transformers
            fields |= _changes(teacher.config, settings, kind)
            named = f"student.init=layers of a {type(teacher).__name__}"
            model = _built(settings, named, lambda: type(teacher)(type(teacher.config).from_dict(fields)).float())
            if getattr(teacher, "generation_config", None) is not None:  # with the tokens that end an answer
                model.generation_config = copy.deepcopy(teacher.generation_config)
    copy_layers(settings, teacher, model, chosen, alias)
    return model


def _from_config(settings: StudentConfig, tokenizer: PreTrainedTokenizerBase, length: int, kind: ModelKind) -> Any:
    check_student_settings(settings)
    special = {
        f"{name}_token_id": getattr(tokenizer, f"{name}_token_id")
        for name in ("pad", "cls", "sep", "bos", "eos")
        if getattr(tokenizer, f"{name}_token_id") is not None
    }
    positions = length + position_offset(settings.architecture, tokenizer.pad_token_id)
    defaults = {"vocab_size": len(tokenizer), "max_position_embeddings": positions}
    model = _of_family(settings.architecture, {**special, **defaults}, settings, kind)
    if settings.init == "neighbours":
        attend_to_neighbours(model)
    return model


def _of_family(architecture: str, fields: dict[str, Any], settings: StudentConfig, kind: ModelKind) -> Any:
    """A new model of a transformers family; `student.config` and `student.dropout` override everything."""
    named, config = f"student.architecture={architecture}", _family(architecture)
    refuse_other_kind(named, config, kind)
    fields = {**fields, **kind.fields, **_changes(config, settings, kind)}
    fields.pop("model_type", None)

    def build() -> Any:
        return kind.auto_class.from_config(AutoConfig.for_model(architecture, **fields), dtype=torch.float32)

    return _built(settings, named, build)


def _built(settings: StudentConfig, named: str, build: Callable[[], Any]) -> Any:
    """The model that `build` makes, unless its family refuses its fields or this host has no memory for it."""
    named = f"{named} with student.config={settings.config}"
    try:
        if new_parameters_take_memory():
            require_memory_for_weights(named, build, copies=2)
        return build()
    except SettingError:
        raise
    except (*UNFIT, StrictDataclassError) as error:
        # Of a name that a table of transformers lacks, such as that of an activation, a KeyError has no more than that.
        unknown = "it knows no " if isinstance(error, KeyError) else ""
        raise SettingError(
            f"{named} makes no model ({unknown}{' '.join(str(error).split()) or first_line(error)}): correct "
            "student.config, or build the student in a function of your own, student=custom student._target_=..."
        ) from error


def _changes(config: Any, settings: StudentConfig, kind: ModelKind) -> dict[str, Any]:
    """What `student.dropout` and `student.config` change of a configuration."""
    _check_fields(config, settings.config)
    dropout = DROPOUT if settings.dropout is None and not settings.is_saved else settings.dropout
    return {**({} if dropout is None else dict.fromkeys(dropout_names(config, kind), dropout)), **settings.config}


def _check_fields(config: Any, changes: dict[str, Any]) -> None:
    """Raises SettingError for changes of a configuration that has no such field, or of a size to what is none."""
    kind = type(config)
    settable = {name for name in dir(kind) if getattr(getattr(kind, name), "fset", None) is not None}
    names = {*config.to_dict(), *config.attribute_map, *settable}
    for name, value in changes.items():
        if name not in names:
            problem = f"is not a field of the {config.model_type} configuration{did_you_mean(name, names)}"
            raise SettingError(f"student.config.{name} {problem}: correct it or leave it out")
        usual = getattr(config, name, None)
        is_size = type(usual) is int and usual > 0 and value is not None and not name.endswith(NO_SIZES)
        if is_size and (type(value) is not int or value < 1):
            raise SettingError(f"student.config.{name}={value} is not a size of a model: give a whole number from 1")


def _path(settings: StudentConfig) -> str:
    if settings.path is None:
        raise SettingError("student.path=null with student.init=pretrained: give a folder or a name on the Hub")
    return settings.path


def _from_pretrained(
    settings: StudentConfig, tokenizer: PreTrainedTokenizerBase, kind: ModelKind, mapped: bool, reads_head: bool
) -> Any:
    path, hub = _path(settings), HubOptions(None, settings.trust_remote_code)
    folder = Path(model_folder(path, "student.path"))
    files = (file for name in ("tokenizer*", "vocab*", "*.model") for file in folder.glob(name))
    if settings.tokenizer is None or not folder.is_dir() or any(files):
        # Its own, in spite of student.tokenizer: the ids of its embeddings are those of that tokenizer.
        check_tokenizers(tokenizer, load_tokenizer("student.path", path, kind, hub), f"student.path={path}")
    new_heads = not (kind.vocabulary and reads_head)
    changes = lambda config: _changes(config, settings, kind)  # noqa: E731
    model = load_pretrained("student.path", path, kind, hub, new_heads, changes, mapped)
    refuse_tying(settings.config, model, f"student.path={path}")
    return model


def check_student_settings(settings: StudentConfig) -> None:
    """Raises SettingError for settings of which no student can be made, as far as its family decides that."""
    if settings.is_saved:
        _path(settings)
    elif settings.is_new and settings.architecture == "same":
        raise SettingError(
            f"student.architecture=same with student.init={settings.init}: name a transformers model type, e.g. bert"
        )
    elif settings.custom is None and settings.architecture != "same":
        _check_fields(_family(settings.architecture), settings.config)


def _family(architecture: str) -> Any:
    """The configuration of a family of transformers with its defaults. Raises SettingError where there is none."""
    if architecture not in CONFIG_MAPPING:
        raise SettingError(
            f"student.architecture={architecture} is not a transformers model type"
            f"{did_you_mean(architecture, CONFIG_MAPPING)}: name one such as bert, distilbert, albert or gpt2"
        )
    return AutoConfig.for_model(architecture)


# --- a start that looks at neighbouring positions, so that it learns from context at once


def attend_to_neighbours(model: Any) -> None:
    """Change the position embeddings [positions, E] and the first layer's queries and keys [H, H] in place.

    A small BERT from plain random weights stays long at the level of token frequencies: its attention is uniform, the
    average of a whole sequence holds next to nothing about a masked token, and no head has a reason to prefer the
    tokens beside it. Here the position embeddings are waves of evenly spaced frequencies, which makes the positions
    nearly orthogonal, and queries and keys of the first layer read them with a shift, so that head h attends to offset
    -1, +1, -2, +2, ... from the first step on. The waves are those of Vaswani et al. 2017 with other frequencies; that
    a shift of them is a rotation is noted there. All weights stay free to change.

    In an ALBERT, whose embeddings are narrower than its layers (E < H), the map between them becomes the identity in
    its first E outputs, so that the layer finds the waves there; and its layer is all of its layers.
    """
    family, heads = model.config.model_type, model.config.num_attention_heads
    if family not in FIRST_ATTENTION:
        known = ", ".join(FIRST_ATTENTION)
        raise SettingError(f"student.init=neighbours is for {known}, not for {family}: set student.init=random")
    attention = model.base_model.get_submodule(FIRST_ATTENTION[family])
    names = ("q_lin", "k_lin") if family == "distilbert" else ("query", "key")
    query, key = (getattr(attention, name).weight for name in names)
    positions = model.base_model.embeddings.position_embeddings.weight
    width, size = positions.shape[1], len(query) // heads
    if size % 2 or width % 2:
        raise SettingError(f"student.init=neighbours needs heads of even size, not {size}: choose other heads")
    count = width // 2
    frequencies = math.pi * torch.arange(1, count + 1) / (count + 1)
    angles = torch.arange(len(positions))[:, None] * frequencies
    spread = math.sqrt(2) * model.config.initializer_range  # of a wave with the tokens' standard deviation
    with torch.no_grad():
        positions[:, 0::2], positions[:, 1::2] = spread * angles.sin(), spread * angles.cos()
        if family == "albert":
            _keep_embeddings(model.base_model.encoder.embedding_hidden_mapping_in.weight)
        for head in range(heads):
            offset = (head // 2 + 1) * (-1 if head % 2 == 0 else 1)
            slots = torch.arange(head, heads * (size // 2), heads)  # every head gets waves of all lengths
            waves = slots * count // (heads * (size // 2))
            sines = head * size + 2 * torch.arange(size // 2)
            turn = offset * frequencies[waves]
            key[sines, 2 * waves] += GAIN
            key[sines + 1, 2 * waves + 1] += GAIN
            query[sines, 2 * waves] += GAIN * turn.cos()
            query[sines, 2 * waves + 1] += GAIN * turn.sin()
            query[sines + 1, 2 * waves] -= GAIN * turn.sin()
            query[sines + 1, 2 * waves + 1] += GAIN * turn.cos()


def _keep_embeddings(mapping: torch.Tensor) -> None:
    """Make a map [H, E] pass its input on in the first E outputs, and mix it, with the same variance, in the others."""
    width = min(mapping.shape)
    mapping.normal_(std=mapping.shape[1] ** -0.5)
    mapping[:width] = torch.eye(width, mapping.shape[1])
