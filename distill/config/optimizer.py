"""The settings of the optimizer and of the schedule of its learning rate."""

from typing import ClassVar, Literal

from pydantic.json_schema import SkipJsonSchema

from distill.config.component import OPTIMIZERS, SCHEDULES, Chosen, group_named
from distill.config.model import setting


class OptimizerConfig(Chosen):
    """What moves the weights; its further settings are arguments of the optimizer."""

    package: ClassVar[str] = OPTIMIZERS

    group: SkipJsonSchema[str] = group_named("optimizer")
    kind: str = setting("adamw", "A file of `distill/optim/optimizers/`.")
    lr: float = setting(5e-4, "Learning rate at its highest.", ge=1e-12, le=1e6)
    scale_lr: Literal["none", "linear", "sqrt"] = setting(
        "none", "How lr grows with the sequences of a step over base_batch: linearly, by the square root, or not."
    )
    base_batch: int | None = setting(
        None, "Sequences a step, of all ranks together, that lr is meant for.", unit="sequences", ge=1, le=10**9
    )
    clip: float | None = setting(5.0, "Largest norm of the whole gradient; null does not clip.", ge=1e-9, le=1e9)
    clip_each_rank: bool = setting(
        False, "Let each rank clip the gradient of its own sequences before the exchange, which then cannot overlap."
    )


class ScheduleConfig(Chosen):
    """The learning rate over the run; its further settings are arguments of the schedule."""

    package: ClassVar[str] = SCHEDULES

    group: SkipJsonSchema[str] = group_named("schedule")
    kind: str = setting("linear", "A file of `distill/optim/schedules/`.")
