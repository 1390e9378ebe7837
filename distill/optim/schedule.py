"""How long a run is, how far it is, and the schedule that its learning rate follows."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from distill.config.component import Component
from distill.config.settings import TrainConfig
from distill.runtime.errors import SettingError

ENDLESS = 10**9  # steps of a run that only the clock ends

Schedule = Callable[[float], float]  # progress from 0 to 1 -> fraction of the learning rate


def total_steps(settings: TrainConfig, steps_per_epoch: int) -> int:
    """The number of steps after which the run ends, wall-clock aside: the first limit that is reached."""
    limits = []
    if settings.epochs is not None:
        limits.append(settings.epochs * steps_per_epoch)
    if settings.steps is not None:
        limits.append(settings.steps)
    return min(limits, default=ENDLESS)


def length_in_steps(settings: TrainConfig, steps_per_epoch: int) -> int | None:
    """The number of steps of the run; None where the clock may end it."""
    return None if settings.minutes is not None else total_steps(settings, steps_per_epoch)


@dataclass(frozen=True)
class Limits:
    """What ends a run: a number of steps or the clock, whichever comes first."""

    steps: int  # ENDLESS for a run that only the clock ends
    minutes: float  # of training; infinite for a run that only its steps end
    by_epochs: bool  # whether the steps are those of whole epochs, as the settings require

    @classmethod
    def of(cls, settings: TrainConfig, steps_per_epoch: int) -> "Limits":
        steps = total_steps(settings, steps_per_epoch)
        by_epochs = settings.epochs is not None and steps == settings.epochs * steps_per_epoch
        return cls(steps, settings.minutes or math.inf, by_epochs)

    def reached(self, step: int, seconds: float) -> bool:
        """Whether a run ends that has done so many steps in so many seconds."""
        return step >= self.steps or seconds >= 60 * self.minutes

    def progress(self, step: int, seconds: float) -> float:
        """How far the middle of the step behind so many others is in the run, from 0 to 1.

        That is by steps or by the clock, whichever ends it first.
        """
        return min(max((step + 0.5) / self.steps, seconds / (60 * self.minutes)), 1.0)

    def ended_by(self, step: int) -> str:
        """Which limit a run has reached that ends after so many steps: epochs, steps or minutes."""
        if step < self.steps:
            return "minutes"
        return "epochs" if self.by_epochs else "steps"


def make_schedule(settings: Component, total_steps: int | None, peak_lr: float) -> Schedule:
    """The schedule that the settings name.

    Args:
        total_steps: the length of the run, as `length_in_steps` gives it.
        peak_lr: the learning rate of which it gives the fraction.

    Raises:
        SettingError: settings that it does not take, or something that gives no fraction of a learning rate.
    """
    schedule = settings(total_steps=total_steps, peak_lr=peak_lr)
    setting = f"schedule._target_={settings.path}"
    if not callable(schedule):
        raise SettingError(
            f"{setting} gives a {type(schedule).__name__}, which cannot be called with the progress of the run: name a "
            "class with __call__(self, progress), or a function that gives a function of it"
        )
    for hundredth in range(101):
        try:
            rate_fraction(schedule, hundredth / 100)
        except SettingError as error:
            raise SettingError(f"{setting}: {error}") from error
        except Exception as error:
            raise SettingError(f"{setting} fails at progress {hundredth / 100}: {error}") from error
    return schedule


def rate_fraction(schedule: Schedule, progress: float) -> float:
    """The fraction of the learning rate in force at `progress`. Raises SettingError where that is no fraction."""
    value = float(schedule(progress))
    if not 0 <= value < math.inf:
        raise SettingError(f"the schedule gives {value} at progress {progress:g}: give a number that is at least 0")
    return value
