"""Make the student: from teacher layers, from a configuration, from a saved model, or by the user's callable."""

import copy
import logging
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, PreTrainedModel, PreTrainedTokenizerBase

from distill.config.settings import StudentConfig
from distill.distributed.mapped import new_parameters_take_memory, parameters_on_meta
from distill.models.check import check_length, check_model, check_positions, check_tokenizers, position_offset
from distill.models.custom import custom_model, tokenizer_in_memory
from distill.models.fields import check_fields, family
from distill.models.from_layers import copy_layers, student_fields
from distill.models.frozen import EMBEDDINGS, freeze
from distill.models.gradient_checkpointing import require_blocks
from distill.models.initialisation import attend_to_neighbours
from distill.models.kernels.attention import keep_soft_cap
from distill.models.kind import MASKED, ModelKind, refuse_other_kind
from distill.models.layer_choice import AUTO, RULES, Layer, are_layers, choose_layers, flat
from distill.models.load import HubOptions, load_pretrained, load_tokenizer, model_folder
from distill.models.memory import weights_bytes
from distill.models.ties import refuse_tying
from distill.runtime.errors import SettingError, choose, first_line
from distill.runtime.host import free_memory

logger = logging.getLogger(__name__)

DROPOUT = 0.1  # of models that are made here, unless another is given

# What the families of transformers raise for sizes that do not fit each other.
UNFIT = (ValueError, TypeError, AssertionError, ArithmeticError, LookupError, AttributeError, RuntimeError)

# Rates of parts that no language model trains, but for the first where there is a head on whole sequences.
OTHER_DROPOUTS = ("classifier", "cls_", "summary", "pooler", "layerdrop", "drop_path", "stochastic_depth")


def dropout_names(config: Any, kind: ModelKind = MASKED) -> list[str]:
    """The dropout rates of a transformers configuration: every family has names of its own for them."""
    fields = vars(config)
    others = [name for name in OTHER_DROPOUTS if not (kind.heads and name == "classifier")]
    rates = (name for name in fields if "dropout" in name or name.endswith("_pdrop"))
    return [
        name
        for name in rates
        if isinstance(fields[name], int | float) and not isinstance(fields[name], bool)
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

    Raises:
        SettingError: an unknown start or one that lacks its source, or sequences too long for it.
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
    frozen = settings.frozen if make is None else []
    freeze(model, frozen)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise _all_frozen(settings, frozen)
    if mapped:
        return model.train()
    check_student(model, length, kind)
    return model.float().train()


def _all_frozen(settings: StudentConfig, frozen: list[Any]) -> SettingError:
    if frozen:
        return SettingError(f"student.frozen={frozen} freezes all weights of the student: remove some of the entries")
    named = "" if settings.custom is None else f"._target_={settings.custom.path}"
    return SettingError(
        f"student{named}: no weight of the student is trained, since requires_grad is off in all of them, as in the "
        "teacher and in its copies: call requires_grad_(True) on it"
    )


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
    available = teacher.config.num_hidden_layers
    if settings.layers == AUTO:
        return _from_any_layers(settings, teacher, kind, mapped)
    chosen = choose_layers(settings.layers, settings.num_layers, available)
    logger.info(f"the student starts from layers {chosen} of the teacher's {available}")
    return from_layers(settings, teacher, chosen, kind, mapped)


def _from_any_layers(settings: StudentConfig, teacher: Any, kind: ModelKind, mapped: bool) -> Any:
    """A student of as many layers as the ones that are to be found yet, from those of the first rule that fits."""
    refusal: SettingError | None = None
    available = teacher.config.num_hidden_layers
    for rule in (AUTO, *RULES):  # where a layer's number decides its kind, few choices fit
        try:
            return from_layers(settings, teacher, choose_layers(rule, settings.num_layers, available), kind, mapped)
        except SettingError as error:
            refusal = refusal or error
    assert refusal is not None
    raise refusal


def from_layers(settings: StudentConfig, teacher: Any, chosen: list[Layer], kind: ModelKind, alias: bool) -> Any:
    """A student that starts from these layers of a transformers model.

    Args:
        alias: let it have the teacher's tensors themselves; before training they have to be copied.

    Raises:
        SettingError: they do not go into its architecture.
    """
    refuse_tying(settings.config, teacher, "the teacher")
    fields = student_fields(settings, teacher, chosen)
    with parameters_on_meta() if alias else nullcontext():
        if settings.architecture in ("same", teacher.config.model_type):
            model = _build_alike(teacher, fields, settings, kind)
            if getattr(teacher, "generation_config", None) is not None:  # with the tokens that end an answer
                model.generation_config = copy.deepcopy(teacher.generation_config)
        else:
            model = _build(settings.architecture, fields, settings, kind)
    copy_layers(settings, teacher, model, chosen, alias)
    return model


def _build_alike(teacher: Any, fields: dict[str, Any], settings: StudentConfig, kind: ModelKind) -> Any:
    """A new model of the teacher's own class, which need not be registered with transformers.

    Raises:
        SettingError: fields that it refuses.
    """
    fields = {**fields, **_changes(teacher.config, settings, kind)}
    try:
        return _in_memory(lambda: type(teacher)(type(teacher.config).from_dict(fields)).float())
    except SettingError:
        raise
    except (*UNFIT, StrictDataclassError) as error:
        raise SettingError(
            f"student.init=layers with student.config={settings.config} makes no {type(teacher).__name__} "
            f"({first_line(error)}); leave the layers' parts alone, or build the student in a function of your own, "
            "student=custom student._target_=..."
        ) from error


def _from_config(settings: StudentConfig, tokenizer: PreTrainedTokenizerBase, length: int, kind: ModelKind) -> Any:
    if settings.architecture == "same":
        raise _no_architecture(settings)
    special = {
        f"{name}_token_id": getattr(tokenizer, f"{name}_token_id")
        for name in ("pad", "cls", "sep", "bos", "eos")
        if getattr(tokenizer, f"{name}_token_id") is not None
    }
    positions = length + position_offset(settings.architecture, tokenizer.pad_token_id)
    defaults = {"vocab_size": len(tokenizer), "max_position_embeddings": positions}
    model = _build(settings.architecture, {**special, **defaults}, settings, kind)
    if settings.init == "neighbours":
        attend_to_neighbours(model)
    return model


def _build(architecture: str, fields: dict[str, Any], settings: StudentConfig, kind: ModelKind) -> Any:
    """A new model of a transformers family; `student.config` and `student.dropout` override everything.

    Raises:
        SettingError: an unknown family or one that has no models of this kind, or fields that it refuses.
    """
    config = family(architecture)
    refuse_other_kind(f"student.architecture={architecture}", config, kind)
    fields = {**fields, **kind.fields, **_changes(config, settings, kind)}
    fields.pop("model_type", None)
    try:
        return _in_memory(
            lambda: kind.auto_class.from_config(AutoConfig.for_model(architecture, **fields), dtype=torch.float32)
        )
    except SettingError:
        raise
    except (*UNFIT, StrictDataclassError) as error:
        # Of a name that a table of transformers lacks, such as that of an activation, a KeyError has no more than that.
        unknown = "it knows no " if isinstance(error, KeyError) else ""
        raise SettingError(
            f"student.architecture={architecture} with student.config={settings.config} makes no model ({unknown}"
            f"{' '.join(str(error).split())}): correct student.config"
        ) from error


def _in_memory(build: Callable[[], Any]) -> Any:
    """The model that `build` makes, unless this host has no memory for its weights and their gradients.

    A processor's memory is promised before it is there: a process that takes too much is killed without a message.

    Raises:
        SettingError: it has not.
    """
    if not new_parameters_take_memory():
        return build()
    least = 2 * weights_bytes(build)
    if least > (free := free_memory()):
        raise SettingError(
            f"student.config makes a student whose weights and gradients take {least / 1e9:.3g} GB, and "
            f"{free / 1e9:.3g} GB are free: make it smaller"
        )
    return build()


def _changes(config: Any, settings: StudentConfig, kind: ModelKind) -> dict[str, Any]:
    """What `student.dropout` and `student.config` change of a configuration."""
    check_fields(config, settings.config)
    dropout = settings.dropout
    if dropout is None and not settings.is_saved:
        dropout = DROPOUT
    return {**({} if dropout is None else dict.fromkeys(dropout_names(config, kind), dropout)), **settings.config}


def _path(settings: StudentConfig) -> str:
    if settings.path is None:
        raise SettingError("student.path=null with student.init=pretrained: give a folder or a name on the Hub")
    return settings.path


def _from_pretrained(
    settings: StudentConfig, tokenizer: PreTrainedTokenizerBase, kind: ModelKind, mapped: bool, reads_head: bool
) -> Any:
    path, hub = _path(settings), HubOptions(None, settings.trust_remote_code)
    if settings.tokenizer is None or _has_tokenizer(Path(model_folder(path, "student.path"))):
        # Its own, in spite of student.tokenizer: the ids of its embeddings are those of that tokenizer.
        check_tokenizers(tokenizer, load_tokenizer("student.path", path, kind, hub), f"student.path={path}")
    model = load_pretrained(
        "student.path",
        path,
        kind,
        hub,
        new_heads=not (kind.vocabulary and reads_head),
        changes=lambda config: _changes(config, settings, kind),
        mapped=mapped,
    )
    refuse_tying(settings.config, model, f"student.path={path}")
    return model


def _has_tokenizer(folder: Path) -> bool:
    """Whether a model has a tokenizer beside it, as far as is known: one on the Hub is taken to have one."""
    files = (file for name in ("tokenizer*", "vocab*", "*.model") for file in folder.glob(name))
    return not folder.is_dir() or any(files)


def check_student_settings(settings: StudentConfig) -> None:
    """Raises SettingError for settings of which no student can be made, as far as its family decides that."""
    if settings.custom is not None:
        return
    for part in settings.frozen:
        if part != EMBEDDINGS and (not isinstance(part, int) or isinstance(part, bool) or part < 0):
            raise SettingError(
                f"student.frozen={settings.frozen}: {part} is neither {EMBEDDINGS} nor the number of a layer, from 0"
            )
    if settings.is_saved:
        _path(settings)
        return
    if settings.from_layers:
        _check_layers(settings.layers)
    elif settings.architecture == "same":
        raise _no_architecture(settings)
    if settings.architecture != "same":
        check_fields(family(settings.architecture), settings.config)


def _no_architecture(settings: StudentConfig) -> SettingError:
    return SettingError(
        f"student.architecture=same with student.init={settings.init}: name a transformers model type, e.g. bert"
    )


def _check_layers(layers: Any) -> None:
    if layers is None:
        return
    if not isinstance(layers, list):
        choose("student.layers", str(layers), [AUTO, *RULES])
    elif not layers or not are_layers(layers) or any(layer < 0 for layer in flat(layers)):
        raise SettingError(
            f"student.layers={layers} must be whole numbers, such as [0,2,4], or one of {', '.join([AUTO, *RULES])}"
        )
