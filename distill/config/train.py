"""The settings of the training loop: the size of a step, the end of the run, and what is kept on the way."""

from enum import Enum
from typing import Annotated

from pydantic import Field, Strict

from distill.config.model import BATCH, STEPS, Settings, setting
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
