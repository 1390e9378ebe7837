"""The models as training runs them: their number format, sharded or whole on this rank's device, and their kernels."""

import logging
from typing import Any

import torch
from transformers import PreTrainedModel

from distill.config.settings import Config, PrecisionConfig, StudentConfig
from distill.distributed import Ranks
from distill.distributed.devices import keep_threads
from distill.distributed.shard import is_sharded, skeleton_of
from distill.models.blocks import block_list, depth_of
from distill.models.check import check_finite, check_model
from distill.models.kernels.attention import use_batched_products
from distill.models.kernels.dropout import replace_dropout
from distill.models.kernels.frozen import frozen_copy
from distill.models.kernels.masks import use_known_masks
from distill.models.kernels.packed_linear import pack_teacher, retain_heap, return_large_tensors, use_one_gelu
from distill.models.kind import ModelKind
from distill.models.language_model import LanguageModel
from distill.models.layers import AUTO
from distill.models.precision import MIN_SPEEDUP, MODELS, bf16_speedup, dtype_of, resolve, set_products
from distill.models.student import check_student
from distill.models.teacher import STARTS, TITLES
from distill.objective.objective import Objective
from distill.objective.trainable import Trainable
from distill.runtime.errors import SettingError, first_line
from distill.teacher.members import Member, settings_by_member, with_models

# Of one function, before torch.compile gives it up. Blocks of all families share their outermost function, and teacher,
# student, training and evaluation have graphs of their own: on sharded ranks the 8 that torch allows were too few.
GRAPHS = 64

logger = logging.getLogger(__name__)


def resolve_auto(
    config: Config, recorded: dict[str, Any], ranks: Ranks
) -> tuple[Config, dict[str, Any], dict[str, Any] | None]:
    """The settings without any `auto`: there stands what the run began with, or else what suits these ranks.

    Left open are the layers of a new student that are to be searched for, and its refit, as these need the text.

    Args:
        recorded: as `RunFolder` has it.

    Returns:
        The settings, the number formats and threads in force, for checkpoints, and the layers as `Pair` has them.
    """
    began, layers = recorded.get("formats", {}), None
    precision = choose_precision(config.precision, began, ranks)
    threads = keep_threads(config.backend, began, ranks)
    known = recorded.get("layers")
    if layers_are_open(config.student):
        layers = known or _known_layers(config)
        config = config if layers is None else with_layers(config, layers)
    elif known and (known.get("refit") or known.get("neurons")):
        layers = known
    if recorded and config.student.refit:  # its weights are those of a checkpoint
        config = without_refit(config)
    return config.changed(precision=precision), dict(precision) | threads, layers


def layers_are_open(student: StudentConfig) -> bool:
    """Whether the layers that it starts from are still to be chosen."""
    return student.from_layers and student.layers == AUTO


def start_is_open(student: StudentConfig, layers: dict[str, Any] | None) -> bool:
    """Whether weights that it starts from are still to be found, on text; `layers` as `Pair` has them."""
    is_narrowed = student.intermediate_size is None or bool((layers or {}).get("neurons"))
    return layers_are_open(student) or (student.from_layers and (bool(student.refit) or not is_narrowed))


def with_layers(config: Config, layers: dict[str, Any]) -> Config:
    """The settings with layers that were chosen, `layers["layers"]`, in place of student.layers=auto."""
    return config.changed(student=config.student.changed(layers=layers["layers"], num_layers=None))


def without_refit(config: Config) -> Config:
    """The settings of a run whose student needs no refit any more."""
    return config.changed(student=config.student.changed(refit=False))


def _known_layers(config: Config) -> dict[str, Any] | None:
    """The layers of a bundled teacher that are known to be the best; None where they are to be searched for."""
    first = next(iter(settings_by_member(config).values()), None)
    path = None if first is None or not first.model.bundled else first.model.path
    if path is None or config.student.num_layers is not None:
        return None
    logger.info(f"student.layers=auto: {STARTS[path]}, known as the best of {TITLES[path]}")
    return {"layers": list(STARTS[path])}


def choose_precision(settings: PrecisionConfig, recorded: dict[str, str], ranks: Ranks) -> PrecisionConfig:
    """The number formats in force, the same on all ranks: `auto` is what the run began with, else what all ranks have.

    Args:
        recorded: the formats of the checkpoint to resume from, on all ranks; empty where there is none.
    """
    set_products(settings, ranks.device)
    if all(getattr(settings, name) != "auto" for name in MODELS):
        return settings
    if recorded:
        chosen = resolve(settings, "", recorded)
        logger.info(f"precision=auto: {chosen.student}, as this run began")
        return chosen
    speedups = torch.zeros(ranks.size)
    speedups[ranks.rank] = bf16_speedup(ranks.device)
    slowest = float(ranks.sum(speedups).min())
    auto = "bf16" if slowest >= MIN_SPEEDUP else "fp32"
    if ranks.device.type == "cuda":
        reason = f"GPU {'has' if slowest else 'only emulates'} bf16"
    else:
        measured = f"multiplies {slowest:.1f} times as fast in bf16 as in fp32" if slowest else "only emulates bf16"
        reason = f"processor {measured}"
    logger.info(f"precision=auto: {auto}, as this {reason}")
    return resolve(settings, auto, {})


def shard_models(
    ranks: Ranks, teachers: list[Member], student: Any, kinds: tuple[ModelKind, ModelKind], length: int
) -> Any | None:
    """Shard the models that the ranks shard; they are checked now, as they could not run before.

    All ranks call it with the same models.

    Args:
        kinds: of the teachers and of the student.
        length: of a sequence.

    Returns:
        The student without its weights, where it is sharded: what they are gathered into for the export.

    Raises:
        SettingError: a model is not read right.
    """
    if ranks.shards:
        return_large_tensors()
        ranks.barrier()  # hosts may be minutes apart in loading their models
    for member in with_models(teachers) if ranks.shards_teacher else ():
        with ranks.computing():
            ranks.shard(member.model, *blocks_of(member.model), trained=False)
            ranks.barrier()  # weights were read just now
            check_finite(member.model, member.setting, ranks)
            check_model(member.model, member.setting, kinds[0])
    if not ranks.shards_student:
        return None
    if ranks.size > 1 and (rate := getattr(getattr(student, "config", None), "layerdrop", 0)):
        problem = f"drops blocks by chance (layerdrop={rate}), and ranks that shard it would drop different ones"
        raise SettingError(problem, setting="student", cure="set backend.shard_student=false")
    skeleton = skeleton_of(student)
    with ranks.computing():
        ranks.shard(student, *blocks_of(student), trained=True)
        ranks.barrier()
        check_finite(student, "student", ranks)
        check_student(student, length, kinds[1])
    return skeleton


def blocks_of(model: Any) -> tuple[list[torch.nn.Module], int]:
    """The blocks of a model and how often they are called; none where it has no list of them."""
    depth = depth_of(model)
    try:
        return ([], 0) if depth is None else (list(block_list(model.base_model, depth)), depth)
    except ValueError:  # which `check_model` says
        return [], 0


def setup_student(
    student: Any, objective: Objective, precision: PrecisionConfig, ranks: Ranks, checkpoints: bool = False
) -> Trainable:
    """Put what is trained on this rank's device, and choose its kernels; `checkpoints` as `LanguageModel` has it."""
    ranks.place(student, dtype_of(precision.student))
    _choose_attention(student, precision, ranks)
    if ranks.device.type == "cpu":
        if precision.kernels != "plain" and not ranks.shards:  # else memory counts for more
            retain_heap()
        if not precision.compile:
            replace_dropout(student)
    if precision.kernels != "plain" and not precision.compile:
        use_one_gelu(student)  # the teacher has it
    model = LanguageModel(student, precision.student, precision.kernels == "plain", checkpoints)
    return Trainable(model, objective.modules()).to(ranks.device)


def setup_teacher(teacher: Any, precision: PrecisionConfig, ranks: Ranks) -> LanguageModel:
    """Put a teacher on this rank's device, and give it as training runs it.

    That is packed, or computes in another format; the report scores the teacher itself.
    """
    on_gpu = ranks.device.type == "cuda" and precision.teacher != "fp32" and not is_sharded(teacher)
    if on_gpu or precision.quantize_teacher is not None:
        frozen = frozen_copy(teacher, precision, ranks.device)
        dtype = dtype_of(precision.teacher)
        if precision.quantize_teacher or any(weight.dtype != dtype for weight in teacher.parameters()):
            teacher.to("cpu")  # it waits on the host for its scores; else the two have their weights in common
        _choose_attention(frozen, precision, ranks)
        # A buffer may make states of a user's model fp32: autocast alone multiplies these with such weights.
        rounded = isinstance(frozen, PreTrainedModel)
        return LanguageModel(frozen, precision.teacher, precision.kernels == "plain", rounded=rounded)
    widened = teacher if is_sharded(teacher) else teacher.float()  # for good, where it computes in fp32
    frozen = pack_teacher(ranks.place(widened, dtype_of(precision.teacher)), precision, ranks.device)
    _choose_attention(frozen, precision, ranks)
    return LanguageModel(frozen, precision.teacher, precision.kernels == "plain")


def _choose_attention(model: Any, precision: PrecisionConfig, ranks: Ranks) -> None:
    if precision.attention != "auto":
        use_attention(model, precision.attention, ranks.device)
    if ranks.device.type == "cpu":  # these leave a model alone that attends by anything but SDPA
        use_batched_products(model, precision.kernels == "plain" or precision.attention == "sdpa")
    else:
        use_known_masks(model)
    if precision.compile:
        compile_blocks(model)


def use_attention(model: Any, name: str, device: torch.device) -> None:
    """Let a model attend by an implementation of transformers.

    Raises:
        SettingError: it needs a GPU, a package that is not installed, or another family.
    """
    reason = "it needs a GPU" if device.type == "cpu" and name not in ("eager", "sdpa") else ""
    try:
        if not reason:
            model.set_attn_implementation(name)
            reason = "" if model.config._attn_implementation == name else f"a {type(model).__name__} has its own"
    except (AttributeError, ImportError, ValueError) as error:
        reason = first_line(error)
    if reason:
        raise SettingError(reason, setting="precision.attention", value=name, cure="leave it at auto")


def compile_blocks(model: Any) -> None:
    """Send the forward of each of the encoder's blocks through torch.compile; hooks stay outside.

    Blocks that are alike share one graph: that of a whole encoder took five times as long to compile (SmolLM2-135M: 190
    and 38 s), and ran no faster. A model without a list of blocks is compiled whole.
    """
    torch._dynamo.config.recompile_limit = max(GRAPHS, torch._dynamo.config.recompile_limit)
    for module in blocks_of(model)[0] or [model.base_model]:
        module.forward = torch.compile(module.forward)
