"""The settings of the training: loop, optimizer, learning rate, ranks, number formats, tracker, profile, report."""

import re
from collections.abc import Iterator
from enum import StrEnum
from typing import Annotated, ClassVar, Literal

from pydantic import Field, Strict
from pydantic.json_schema import SkipJsonSchema

from distill.config.base import BATCH, IN_SEQUENCES, IN_STEPS, STEPS, Refusal, Settings, refuse, setting
from distill.config.component import OPTIMIZERS, SCHEDULES, Chosen, group_named
from distill.config.errors import shown

# What SIGUSR1 does besides writing a checkpoint: nothing, or it ends the run, as SIGTERM does.
OnUsr1 = StrEnum("OnUsr1", ["save", "stop"])


class TrainConfig(Settings):
    """A step, the length of the run, and its checkpoints."""

    batch_size: int = setting(16, "Most sequences of a micro-batch of a rank.", unit="sequences", ge=1, le=BATCH)
    # Each rank takes its part of them in as many micro-batches as that needs, so the student is the same for any number
    # of ranks, which may change from one start of a run to the next.
    sequences_per_step: int | None = setting(None, "Sequences of a step, all ranks; null: batch_size.", **IN_SEQUENCES)
    # It makes the student depend on the number of ranks, so no recipe that ships gives it.
    accumulate: int | None = setting(None, "Micro-batches a rank, in place of sequences_per_step.", ge=1, le=1_000_000)
    epochs: int | None = setting(1, "Passes over the corpus; the first limit ends the run.", ge=1, le=1_000_000)
    steps: int | None = setting(None, "Steps after which the run ends.", **IN_STEPS)
    minutes: float | None = setting(None, "Time after which the run ends.", unit="minutes", ge=1e-6, le=1e7)
    log_every: int = setting(1, "Steps between two lines of the log.", **IN_STEPS)
    save_every: int = setting(100, "Steps between two checkpoints; each evaluation writes one, too.", **IN_STEPS)
    keep: int = setting(2, "Newest checkpoints kept, besides the newest that has proved good.", ge=1, le=1_000_000)
    async_checkpoints: bool = setting(
        False, "Write them in a thread while training goes on, from a copy in the host's memory."
    )
    snapshots: list[Annotated[int, Strict(), Field(ge=1, le=STEPS)]] | None = setting(
        None, "Steps after which the student is kept in snapshots/step-N, which loads like student/.", unit="steps"
    )
    snapshot_every: int | None = setting(None, "The student is kept so after every so many steps, too.", **IN_STEPS)
    keep_best: str | None = setting(None, "Publish the student that is best by this, such as perplexity; null: last.")
    patience: int | None = setting(None, "End after so many evaluations in a row that are no better.", ge=1, le=STEPS)
    max_nonfinite: int = setting(10, "Steps in a row that are not finite before the run stops.", **IN_STEPS)
    max_loss_ratio: float | None = setting(
        3.0, "A checkpoint is good when the next loss is at most so many times that of the first step; null: any.",
        ge=1, le=1e9,
    )  # fmt: skip
    max_spike: int = setting(1000, "Steps in a row above max_loss_ratio before the run stops.", **IN_STEPS)
    on_usr1: OnUsr1 = setting(OnUsr1.save, "SIGUSR1 writes a checkpoint; stop ends the run after it, like SIGTERM.")
    workers: int | None = setting(None, "Threads that prepare batches; null goes by cores.", ge=0, le=1024)

    def sequences(self, ranks: int) -> int:
        """Sequences of a step of so many ranks together."""
        if self.accumulate is not None:
            return self.batch_size * self.accumulate * ranks
        return self.sequences_per_step or self.batch_size

    def refusals(self) -> Iterator[Refusal]:
        if self.epochs is None and self.steps is None and self.minutes is None:
            yield ".epochs", "null", "train.steps and train.minutes are null too", "give the run an end"
        if self.patience is not None and self.keep_best is None:
            cure = "set train.keep_best=perplexity, or another measure"
            yield ".patience", self.patience, "needs a measure by which evaluations are compared", cure

    def refuse_unread(self, named: set[str]) -> None:
        """Raises SettingError where the command line names a size of a step that the run would not read.

        A recipe's own are no mistakes: its micro-batch may be more than a step that the command line gives.
        """
        size = self.sequences_per_step
        if size is not None and self.accumulate is not None and "sequences_per_step" in named:
            problem = f"not read with train.accumulate={self.accumulate}, the micro-batches of each rank"
            refuse([("train.sequences_per_step", size, problem, "leave one of them out, or set it to null")])
        if size is not None and self.accumulate is None and "batch_size" in named and self.batch_size > size:
            cure = f"set train.sequences_per_step={self.batch_size} too, or train.batch_size to at most {size}"
            refuse([("train.batch_size", self.batch_size, "more than a step has", cure)])

    @property
    def length(self) -> dict[str, float | None]:
        """The limits of the run by their names; records of runs without patience have none."""
        limits = {"epochs": self.epochs, "steps": self.steps, "minutes": self.minutes}
        return limits if self.patience is None else {**limits, "patience": self.patience}


class OptimizerConfig(Chosen):
    """What moves the weights; its further settings are arguments of the optimizer."""

    package: ClassVar[str] = OPTIMIZERS

    group: SkipJsonSchema[str] = group_named("optimizer")
    kind: str = setting("adamw", "A file of `distill/optim/optimizers/`.")
    lr: float = setting(5e-4, "Learning rate at its highest.", ge=1e-12, le=1e6)
    scale_lr: Literal["none", "linear", "sqrt"] = setting("none", "How lr grows with a step's size over base_batch.")
    base_batch: int | None = setting(None, "Sequences of a step that lr is meant for.", **IN_SEQUENCES)
    clip: float | None = setting(5.0, "Largest norm of the whole gradient; null does not clip.", ge=1e-9, le=1e9)
    clip_each_rank: bool = setting(False, "Let each rank clip its own gradient before the exchange.")

    def refusals(self) -> Iterator[Refusal]:
        if (self.scale_lr == "none") != (self.base_batch is None):
            cure = "set linear or sqrt and the sequences per step that optimizer.lr was tuned for, or none and null"
            yield ".scale_lr", self.scale_lr, f"does not go with optimizer.base_batch={shown(self.base_batch)}", cure
        if self.clip_each_rank and self.clip is None:
            yield ".clip_each_rank", True, "optimizer.clip=null", "give clip a norm"


class ScheduleConfig(Chosen):
    """The learning rate over the run; its further settings are arguments of the schedule."""

    package: ClassVar[str] = SCHEDULES

    group: SkipJsonSchema[str] = group_named("schedule")
    kind: str = setting("linear", "A file of `distill/optim/schedules/`.")


DEVICE = r"auto|cpu|cuda(:(0|[1-9]\d{0,2}))?"


class BackendConfig(Settings):
    """The processes of a run, their devices, and the exchange of gradients."""

    name: Literal["single", "ddp", "fsdp", "horovod"] = setting("single", "The engine that connects the ranks.")
    device: str = setting("auto", "Device of a rank: auto, cpu, cuda or cuda:<number>.")
    # Beyond that many, OpenMP ends the process when it cannot start them.
    threads: int | None = setting(None, "Threads of torch on the CPU; null is one for each core.", ge=1, le=1024)
    processes: int | None = setting(None, "Ranks to start here; null: of a launcher, or one a GPU.", ge=1, le=65_536)
    hosts: str | None = setting(None, "Machines and their ranks, e.g. a:8,b:8, for the launcher of the engine.")
    rings: int = setting(1, "Connections of Horovod or gloo to each rank.", ge=1, le=64)
    collective: str | None = setting(None, "Plug-in of torch.distributed, NAME or MODULE:NAME; null: gloo or NCCL.")
    sync: Literal["window", "every"] = setting("window", "Exchange gradients once a step, or after every micro-batch.")
    # fp16 has more digits and less range: a gradient with an element above 64 becomes infinite, and its step is skipped
    # on all ranks.
    compression: Literal["none", "bf16", "fp16"] = setting("none", "Number format of gradients on the wire.")
    timeout: float = setting(300.0, "Another rank without an answer for so long is lost.", unit="seconds", gt=0, le=1e7)
    shard_student: bool | None = setting(None, "Shard the student's weights over the ranks of fsdp; null does.")
    shard_teacher: bool | None = setting(None, "Shard the teacher's weights over the ranks of fsdp; null does.")
    shard_size: int | None = setting(
        None, "Ranks of fsdp over which weights are sharded, such as those of a host; null: all.", ge=1, le=65_536
    )
    offload_teacher: bool = setting(False, "Keep the shards of a teacher in the memory of the host, not of the GPU.")

    @property
    def shards_student(self) -> bool:
        """Whether each rank holds a part of the student's weights."""
        return self.name == "fsdp" and self.shard_student is not False

    @property
    def shards_teacher(self) -> bool:
        """Whether each rank holds a part of a teacher's weights."""
        return self.name == "fsdp" and self.shard_teacher is not False

    def refusals(self) -> Iterator[Refusal]:
        if not re.fullmatch(DEVICE, self.device):
            yield ".device", self.device, "not known", "give auto, cpu, cuda or cuda:<number>"
        if self.collective is not None and self.name != "ddp":
            problem = f"is for torch.distributed, and backend.name={self.name} is not"
            yield ".collective", self.collective, problem, "choose backend=ddp, or leave it null"
        if self.collective is not None and self.rings > 1:
            yield ".rings", self.rings, "with a plug-in (backend.collective), which has one ring", "leave it at 1"
        sharded = self.given("shard_student", "shard_teacher", "shard_size")
        for name, value in sharded.items() if self.name != "fsdp" else ():
            problem = f"with backend.name={self.name}: only fsdp shards models over ranks"
            yield f".{name}", value, problem, "set backend=fsdp, or leave it out"
        if self.offload_teacher and not self.shards_teacher:
            cure = "set backend=fsdp without backend.shard_teacher=false"
            yield ".offload_teacher", True, "for a teacher that is sharded", cure


class PrecisionConfig(Settings):
    """Number format of each model's forward: fp32, bf16 or fp16 (autocast), or auto. Weights stay in fp32.

    fp16 is for GPUs that have no bf16; a student in it has its loss scaled (`distill.optim.loss_scale`). auto is bf16
    on a GPU that has it and on a processor that multiplies faster in it, which is measured when a run begins and kept
    when it is resumed; else fp32.
    """

    student: Literal["fp32", "bf16", "fp16", "auto"] = setting("fp32", "Number format of the student's forward.")
    teacher: Literal["fp32", "bf16", "fp16", "auto"] = setting("fp32", "Number format of the teacher's.")
    evaluate: Literal["fp32", "bf16", "fp16", "auto"] = setting("fp32", "Number format of every model that is scored.")
    quantize_teacher: Literal["int8", "fp8"] | None = setting(
        None, "Format of the weights of the teacher's linear layers, by torchao; fp8 needs a GPU that has it."
    )
    tf32: bool = setting(True, "On a GPU, multiply matrices of fp32 in TF32, which has 10 bits of fraction.")
    deterministic: bool = setting(False, "On a GPU, use algorithms that repeat bit for bit, which are slower.")
    attention: Literal["auto", "eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention"] = setting(
        "auto", "transformers' implementation in both models, as attn_implementation; auto is torch's SDPA."
    )
    compile: bool = setting(False, "Run encoders and objective through torch.compile, which is slow to start.")
    kernels: Literal["auto", "plain"] = setting("auto", "auto is what is fastest on this processor; plain is torch.")

    def refusals(self) -> Iterator[Refusal]:
        formats = {name: getattr(self, name) for name in ("student", "teacher", "evaluate")}
        exact = [f"precision.{name}=fp32" for name, value in formats.items() if value == "fp32"]
        if self.attention.startswith("flash") and exact:
            cure = "set precision=bf16 precision.evaluate=bf16, or leave it at auto"
            yield ".attention", self.attention, f"computes in bf16 or fp16 alone, but there is {', '.join(exact)}", cure


class TrackerConfig(Settings):
    """Where metrics go besides metrics.jsonl."""

    kind: Literal["none", "wandb", "tensorboard"] = setting("none", "The tracker.")
    project: str = setting("distill", "Name of the project at the tracker.")
    name: str | None = setting(None, "Name of the run at wandb; null: that of its folder.")
    tags: list[str] = setting(list, "Labels of the run at wandb.")
    mode: Literal["offline", "online"] = setting("offline", "Mode of wandb.")


class ProfileConfig(Settings):
    """What is recorded about where the time goes; none of it changes the student."""

    enabled: bool = setting(False, "Record a profile and add a page to the report.")
    trace_steps: int = setting(2, "Steps that torch.profiler records; 0 is none.", unit="steps", ge=0, le=100)
    stop_after: int | None = setting(None, "End after so many steps with the profile alone.", **IN_STEPS)

    def refusals(self) -> Iterator[Refusal]:
        if self.stop_after is not None and not self.enabled:
            cure = "set profile=on, or leave it out"
            yield ".stop_after", self.stop_after, "not read without a profile", cure


class ReportConfig(Settings):
    """How the report is written while the run goes on."""

    every: float | None = setting(60.0, "Time between two live pages; null: none.", unit="seconds", ge=0, le=86_400)
