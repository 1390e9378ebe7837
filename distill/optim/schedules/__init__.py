"""Learning rates over a run: one file each, found by its name as `schedule.kind`.

A schedule is called with the progress of the run, from 0 to 1, and gives the fraction of the learning rate that is in
force there. One of your own is a class whose objects can be called so, or a function that gives such a function, named
as `schedule._target_`; the settings beside it are its arguments. Where it takes them it also gets `total_steps`, the
length of the run, None where the clock may end it, and `peak_lr`, the learning rate of which it gives the fraction. The
whole curve is its own, a warm-up included.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field


@dataclass
class Warmup(ABC):
    """A linear rise from 0 to 1, then `after`. The fields are its settings, and what it gets of the run.

    `warmup`: length of the rise, as a fraction of the run. `warmup_steps`: the same in steps, with `warmup` 0.

    Raises:
        ValueError: a value out of range, both lengths of the rise, or steps in a run whose length in steps is unknown.
    """

    warmup: float = 0.05
    warmup_steps: int | None = None
    total_steps: int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if self.warmup_steps is not None:
            self.warmup = _fraction_of_steps(self.warmup, self.warmup_steps, self.total_steps)
        self.warmup = _fraction("warmup", self.warmup)

    def __call__(self, progress: float) -> float:
        if progress < self.warmup:
            return progress / self.warmup
        return self.after((progress - self.warmup) / max(1.0 - self.warmup, 1e-12))

    @abstractmethod
    def after(self, progress: float) -> float:
        """The fraction of the learning rate at `progress`, from 0 to 1, after the rise."""


@dataclass
class Decay(Warmup):
    """A rise as in `Warmup`, then a fall from 1 to an end value in the shape of `height`.

    `floor`: the end value as a fraction of the learning rate. `end_lr`: the end value as a learning rate, with `floor`
    0.

    Raises:
        ValueError: as `Warmup`; or both end values, or one above the learning rate.
    """

    floor: float = 0.0
    end_lr: float | None = None
    peak_lr: float = field(default=1.0, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.end_lr is not None:
            self.floor = _fraction_of_rate(self.floor, self.end_lr, self.peak_lr)
        self.floor = _fraction("floor", self.floor)

    def after(self, progress: float) -> float:
        return self.floor + (1.0 - self.floor) * max(self.height(progress), 0.0)

    @abstractmethod
    def height(self, progress: float) -> float:
        """From 1 at `progress` 0 to 0 at 1."""


def _fraction_of_steps(warmup: float, warmup_steps: int, total_steps: int | None) -> float:
    if warmup:
        raise ValueError(f"warmup_steps={warmup_steps} is set beside warmup={warmup}: give warmup=0")
    if total_steps is None:
        raise ValueError(
            f"warmup_steps={warmup_steps} needs a run whose length is fixed in steps, and train.minutes may end this "
            "one: set train.minutes to null, or give warmup as a fraction"
        )
    if not 0 <= warmup_steps <= total_steps:
        raise ValueError(f"warmup_steps={warmup_steps} must be from 0 to {total_steps}, the steps of the run")
    return warmup_steps / total_steps


def _fraction_of_rate(floor: float, end_lr: float, peak_lr: float) -> float:
    if floor:
        raise ValueError(f"end_lr={end_lr} is set beside floor={floor}: give floor=0")
    if not 0 <= end_lr <= peak_lr:
        raise ValueError(f"end_lr={end_lr} must be from 0 to {peak_lr:g}, the learning rate that is to fall")
    return end_lr / peak_lr


def _fraction(name: str, value: float) -> float:
    if not 0 <= value <= 1:
        raise ValueError(f"{name}={value} is a fraction: give a number from 0 to 1")
    return value
