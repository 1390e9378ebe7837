"""The settings of the ranks of a run and of what they exchange."""

import re
from typing import Literal, Self

from pydantic import field_validator, model_validator
from pydantic_core import PydanticCustomError

from distill.config.model import Settings, setting
from distill.runtime.errors import SettingError

MOST_RINGS = 64  # each is a connection of its own to every other rank
DEVICE = r"auto|cpu|cuda(:(0|[1-9]\d{0,2}))?"


class BackendConfig(Settings):
    """The processes of a run, their devices, and the exchange of gradients."""

    name: Literal["single", "ddp", "fsdp", "horovod"] = setting("single", "The engine that connects the ranks.")
    device: str = setting("auto", "Device of a rank: auto, cpu, cuda or cuda:<number>.")
    # Beyond that many, OpenMP ends the process when it cannot start them.
    threads: int | None = setting(
        None, "Threads of torch on the CPU; null takes as many as are quickest at the start.", ge=1, le=1024
    )
    processes: int | None = setting(
        None,
        "Ranks to start on this machine; null: one for each GPU, or those that a launcher has started.",
        ge=1,
        le=65_536,
    )
    hosts: str | None = setting(None, "Machines and their ranks, e.g. a:8,b:8, for the launcher of the engine.")
    rings: str = setting("1", "Connections of Horovod or gloo to each rank: a number, or auto, which measures.")
    collective: str | None = setting(
        None, "Engine of torch.distributed from a plug-in, NAME or MODULE:NAME, of ddp; null is gloo or NCCL."
    )
    sync: Literal["window", "every"] = setting(
        "window", "Exchange gradients once per step, or after every micro-batch."
    )
    # fp16 has more digits and less range: a gradient with an element above 64 becomes infinite, and its step is skipped
    # on all ranks.
    compression: Literal["none", "bf16", "fp16"] = setting("none", "Number format of gradients on the wire.")
    timeout: float = setting(
        300.0, "Time without an answer from another rank after which it counts as lost.", unit="seconds", gt=0, le=1e7
    )
    shard_student: bool | None = setting(None, "Shard the student's weights over the ranks of fsdp; null does.")
    shard_teacher: bool | None = setting(None, "Shard the teacher's weights over the ranks of fsdp; null does.")
    offload_teacher: bool = setting(False, "Keep the shards of a teacher in the memory of the host, not of the GPU.")

    @property
    def shards_student(self) -> bool:
        """Whether each rank holds a part of the student's weights."""
        return self.name == "fsdp" and self.shard_student is not False

    @property
    def shards_teacher(self) -> bool:
        """Whether each rank holds a part of a teacher's weights."""
        return self.name == "fsdp" and self.shard_teacher is not False

    @field_validator("device")
    @classmethod
    def _is_a_device(cls, value: str) -> str:
        if not re.fullmatch(DEVICE, value):
            raise PydanticCustomError("refused", "not known; give auto, cpu, cuda or cuda:<number>")
        return value

    @field_validator("rings")
    @classmethod
    def _is_a_number_of_rings(cls, value: str) -> str:
        if value != "auto" and not (value.isdecimal() and 1 <= int(value) <= MOST_RINGS):
            verdict = "too large" if value.isdecimal() and int(value) > MOST_RINGS else "no number of rings"
            raise PydanticCustomError("refused", f"{verdict}; give a number from 1 to {MOST_RINGS}, or auto")
        return value

    @model_validator(mode="after")
    def _shards_models_with_fsdp_alone(self) -> Self:
        for name in ("shard_student", "shard_teacher"):
            if self.name != "fsdp" and getattr(self, name) is not None:
                raise SettingError(
                    f"with backend.name={self.name}: only fsdp shards models over ranks",
                    setting=f"backend.{name}",
                    value=getattr(self, name),
                    cure="set backend=fsdp, or leave it out",
                )
        if self.offload_teacher and not self.shards_teacher:
            raise SettingError(
                "for a teacher that is sharded",
                setting="backend.offload_teacher",
                value="true",
                cure="set backend=fsdp without backend.shard_teacher=false",
            )
        return self


class PrecisionConfig(Settings):
    """Number format of each model's forward: fp32, bf16 or fp16 (autocast), or auto. Weights stay in fp32.

    fp16 is for GPUs that have no bf16; a student in it has its loss scaled (`distill.optim.loss_scale`). auto is bf16
    where the processor or GPU multiplies faster in it, which is measured when a run begins and kept when it is resumed;
    else fp32. The teacher in training can be int8 too (`distill.models.kernels.int8`), but never as a model that is
    scored.
    """

    student: Literal["fp32", "bf16", "fp16", "auto"] = setting("fp32", "Number format of the student's forward.")
    teacher: Literal["fp32", "bf16", "fp16", "auto", "int8"] = setting(
        "fp32", "Number format of the teacher's forward in training."
    )
    evaluate: Literal["fp32", "bf16", "fp16", "auto"] = setting("fp32", "Number format of every model that is scored.")
    compile: bool = setting(
        False, "Run encoders and objective through torch.compile, which is slow to start and then faster."
    )
    kernels: Literal["auto", "plain"] = setting(
        "auto", "auto takes what is fastest on this processor, plain torch's own kernels everywhere."
    )
