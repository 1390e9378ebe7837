"""The settings of the training: the loop and its end, ranks, number formats, tracker, profile and report."""

import re
from enum import Enum
from typing import Annotated, Literal, Self

from pydantic import Field, Strict, field_validator, model_validator
from pydantic_core import PydanticCustomError

from distill.config.base import BATCH, STEPS, Settings, setting
from distill.runtime.errors import SettingError


class OnUsr1(Enum):
    """What SIGUSR1 does besides writing a checkpoint."""

    save = "save"  # nothing: the run goes on
    stop = "stop"  # it ends the run, as SIGTERM does


class TrainConfig(Settings):
    """A step, the length of the run, and its checkpoints."""

    batch_size: int = setting(
        16, "The most sequences of a micro-batch of a rank: a matter of memory.", unit="sequences", ge=1, le=BATCH
    )
    # Each rank takes its part of them in as many micro-batches as that needs, so the student is the same for any number
    # of ranks, which may change from one start of a run to the next.
    sequences_per_step: int | None = setting(
        None, "Sequences of one step of all ranks together; null is batch_size.", unit="sequences", ge=1, le=10**9
    )
    # It makes the student depend on the number of ranks, so no recipe that ships gives it.
    accumulate: int | None = setting(
        None,
        "Micro-batches of each rank in a step, in place of sequences_per_step; null: as many as that needs.",
        ge=1,
        le=1_000_000,
    )
    epochs: int | None = setting(
        1, "Passes over the corpus; the run ends at the first limit that it reaches.", ge=1, le=1_000_000
    )
    steps: int | None = setting(None, "Steps after which the run ends.", unit="steps", ge=1, le=STEPS)
    minutes: float | None = setting(None, "Time after which the run ends.", unit="minutes", ge=1e-6, le=1e7)
    log_every: int = setting(1, "Steps between two lines of the log.", unit="steps", ge=1, le=STEPS)
    save_every: int = setting(
        100, "Steps between two checkpoints; one is also written wherever the student is scored.", unit="steps", ge=1,
        le=STEPS,
    )  # fmt: skip
    keep: int = setting(
        2, "Newest checkpoints kept, besides the newest that a later loss has shown to be good.", ge=1, le=1_000_000
    )
    snapshots: list[Annotated[int, Strict(), Field(ge=1, le=STEPS)]] | None = setting(
        None,
        "Steps after which the student is kept in snapshots/step-N, a folder that loads like student/.",
        unit="steps",
    )
    snapshot_every: int | None = setting(
        None, "The student is kept in such a folder after every so many steps, too.", unit="steps", ge=1, le=STEPS
    )
    keep_best: str | None = setting(
        None,
        "Publish the student of the best evaluation by this measure, such as perplexity or heldout.perplexity; null: "
        "the last.",
    )
    patience: int | None = setting(
        None, "The run ends after so many evaluations in a row that train.keep_best calls no better.", ge=1, le=STEPS
    )
    max_nonfinite: int = setting(
        10, "Steps in a row without a finite loss and gradient before the run stops.", unit="steps", ge=1,
        le=1_000_000,
    )  # fmt: skip
    max_loss_ratio: float | None = setting(
        3.0, "A checkpoint is good when the next loss is at most so many times that of the first step; null: any.",
        ge=1, le=1e9,
    )  # fmt: skip
    max_spike: int = setting(
        1000, "Steps in a row with a loss above max_loss_ratio times the first step's before the run stops.",
        unit="steps", ge=1, le=10**9,
    )  # fmt: skip
    on_usr1: OnUsr1 = setting(
        OnUsr1.save, "SIGUSR1 writes a checkpoint; stop ends the run after it like SIGTERM, for batch systems."
    )
    workers: int | None = setting(
        None, "Threads that prepare batches ahead; 0 is none, null goes by the rank's cores and waiting time.", ge=0,
        le=1024,
    )  # fmt: skip

    def sequences(self, ranks: int) -> int:
        """Sequences of a step of so many ranks together."""
        if self.accumulate is not None:
            return self.batch_size * self.accumulate * ranks
        return self.sequences_per_step or self.batch_size

    def refuse_unread(self, named: set[str]) -> None:
        """Refuse what the command line gives of the size of a step where the run would not read it.

        Args:
            named: the settings that the command line names.

        Raises:
            SettingError: both sizes, or a micro-batch that is more than a step.
        """
        size = self.sequences_per_step
        if size is None:
            return
        if self.accumulate is not None and "sequences_per_step" in named:
            raise SettingError(
                f"not read with train.accumulate={self.accumulate}, the micro-batches of each rank",
                setting="train.sequences_per_step",
                value=size,
                cure="leave one of them out, or set it to null",
            )
        if self.accumulate is None and "batch_size" in named and self.batch_size > size:
            raise SettingError(
                "more than a step has",
                setting="train.batch_size",
                value=self.batch_size,
                cure=f"set train.sequences_per_step={self.batch_size} too, or train.batch_size to at most {size}",
            )

    @property
    def length(self) -> dict[str, float | None]:
        """The limits of the run by their names; records of runs without patience have none."""
        limits = {"epochs": self.epochs, "steps": self.steps, "minutes": self.minutes}
        return limits if self.patience is None else {**limits, "patience": self.patience}


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


class TrackerConfig(Settings):
    """Where metrics go besides metrics.jsonl."""

    kind: Literal["none", "wandb", "tensorboard"] = setting("none", "The tracker.")
    project: str = setting("distill", "Name of the project at the tracker.")
    name: str | None = setting(None, "Name of the run at wandb; null: that of its folder.")
    tags: list[str] = setting(None, "Labels of the run at wandb.", factory=list)
    mode: Literal["offline", "online"] = setting("offline", "Mode of wandb.")


class ProfileConfig(Settings):
    """What is recorded about where the time goes; none of it changes the student."""

    enabled: bool = setting(False, "Record a profile and add a page to the report.")
    trace_steps: int = setting(
        2, "Steps that torch.profiler records operation by operation; 0 is none.", unit="steps", ge=0, le=100
    )
    stop_after: int | None = setting(
        None, "End the run after this many steps with the profile alone, without student, checkpoint or report.",
        unit="steps", ge=1, le=STEPS,
    )  # fmt: skip

    @model_validator(mode="after")
    def _stops_with_a_profile_alone(self) -> Self:
        if self.stop_after is not None and not self.enabled:
            raise SettingError(
                "not read without a profile",
                setting="profile.stop_after",
                value=self.stop_after,
                cure="set profile=on, or leave it out",
            )
        return self


class ReportConfig(Settings):
    """How the report is written while the run goes on."""

    every: float | None = setting(
        15.0, "Time between two pages of a run that is under way; null or 0 writes the report only at the end.",
        unit="seconds", ge=0, le=86_400,
    )  # fmt: skip
