"""Refuses settings of the training, of its optimizer and of its ranks that no run can have."""

import math
import re

from distill.config.settings import BackendConfig, Config
from distill.distributed import parse_rings
from distill.distributed.collective import check_collective
from distill.distributed.interface import WIRE
from distill.optim import updates as optim
from distill.optim.optimizer_state import optimizer_state
from distill.optim.schedule import ENDLESS, length_in_steps, make_schedule
from distill.runtime.errors import SettingError
from distill.runtime.nearest import choose

FORMATS = ("fp32", "bf16", "fp16", "auto")
DEVICE = r"auto|cpu|cuda(:\d+)?"
MOST_RINGS = 64  # each is a connection of its own to every other rank


def check_training(config: Config) -> None:
    """Raises SettingError for a run without an end, and for an optimizer, ranks or formats that cannot be."""
    settings = config.train
    if settings.epochs is None and settings.steps is None and settings.minutes is None:
        raise SettingError("train.epochs, train.steps and train.minutes are all null: give the run an end")
    _check_optimizer(config)
    _check_backend(config.backend)
    _check_divided(config)
    for name in ("student", "teacher", "evaluate"):
        formats = (*FORMATS, "int8") if name == "teacher" else FORMATS
        choose(f"precision.{name}", getattr(config.precision, name), formats)
    choose("precision.kernels", config.precision.kernels, ("auto", "plain"))
    choose("tracker.kind", config.tracker.kind, ("none", "wandb", "tensorboard"))
    choose("tracker.mode", config.tracker.mode, ("offline", "online"))


def _check_backend(settings: BackendConfig) -> None:
    choose("backend.name", settings.name, ("single", "ddp", "fsdp", "horovod"))
    _check_sharding(settings)
    choose("backend.sync", settings.sync, ("window", "every"))
    choose("backend.compression", settings.compression, ("none", *WIRE))
    if not re.fullmatch(DEVICE, settings.device):
        raise SettingError(f"backend.device={settings.device} is not known: give auto, cpu, cuda or cuda:<number>")
    if (rings := parse_rings(settings.rings)) is not None and rings > MOST_RINGS:
        raise SettingError(
            f"backend.rings={settings.rings} is too large: give a number from 1 to {MOST_RINGS}, or auto"
        )
    check_collective(settings)


def _check_sharding(settings: BackendConfig) -> None:
    for name in ("shard_student", "shard_teacher"):
        if settings.name != "fsdp" and getattr(settings, name) is not None:
            raise SettingError(
                f"backend.{name}={getattr(settings, name)} with backend.name={settings.name}: only fsdp divides models "
                "between ranks; set backend=fsdp, or leave it out"
            )
    if settings.offload_teacher and (settings.name != "fsdp" or settings.shard_teacher is False):
        raise SettingError(
            "backend.offload_teacher=true is for a teacher that is divided: set backend=fsdp without "
            "backend.shard_teacher=false"
        )


def _check_divided(config: Config) -> None:
    """Raises SettingError for what models that are divided between ranks do not have."""
    settings = config.backend
    if settings.name != "fsdp":
        return
    # What is divided is exchanged by `fully_shard`, in fp32 and in one ring.
    for name, value, usual in (("compression", settings.compression, "none"), ("rings", settings.rings, "1")):
        if settings.shard_student is not False and value != usual:
            raise SettingError(
                f"backend.{name}={value} is for gradients that each rank has whole, which a divided student never has: "
                f"leave it out, or choose backend=ddp or backend.shard_student=false"
            )
    formats = {"precision.teacher": config.precision.teacher} if config.teacher.kind != "none" else {}
    if config.teacher.kind == "several":
        formats |= {
            f"teacher.members.{name}.precision": each.precision for name, each in config.teacher.members.items()
        }
    for name, value in formats.items():
        if settings.shard_teacher is not False and value == "int8":
            raise SettingError(
                f"{name}=int8 rounds whole weights, which no rank has of a divided teacher: choose bf16 or fp32, or "
                "backend.shard_teacher=false"
            )


def _check_optimizer(config: Config) -> None:
    """And its schedule, as far as it can be known before the corpus says how many steps an epoch has."""
    settings = config.optimizer
    choose("optimizer.scale_lr", settings.scale_lr, ("none", "linear", "sqrt"))
    if (settings.scale_lr == "none") != (settings.base_batch is None):
        raise SettingError(
            f"optimizer.scale_lr={settings.scale_lr} with optimizer.base_batch={settings.base_batch}: give linear or "
            "sqrt and the rows a step that optimizer.lr is meant for, or none and null"
        )
    if settings.clip_each_rank and settings.clip is None:
        raise SettingError("optimizer.clip_each_rank=true, but optimizer.clip=null: give clip a norm")
    if settings.clip_each_rank and config.backend.name == "fsdp":
        raise SettingError(
            "optimizer.clip_each_rank=true needs the gradient of each rank, which fsdp never has: choose backend=ddp "
            "or horovod, or leave it out"
        )
    if settings.clip_each_rank and config.backend.sync == "every":
        raise SettingError(
            "optimizer.clip_each_rank=true clips once, before the only exchange of a step, but backend.sync=every "
            "exchanges after each micro-batch: set backend.sync=window"
        )
    optimizer_state(*optim.try_out(settings))
    scaled = settings.scale_lr != "none"  # by the rows of a step, which the backend knows
    _check_wire(config)
    make_schedule(config.schedule, length_in_steps(config.train, ENDLESS), math.inf if scaled else settings.lr)


def _check_wire(config: Config) -> None:
    if config.precision.student == "fp16" and config.backend.compression == "fp16":
        raise SettingError(
            "backend.compression=fp16 with precision.student=fp16 would scale gradients twice, for the format and for "
            "the wire, and lose small ones: set backend.compression=bf16 or none"
        )
