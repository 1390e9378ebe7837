"""A number that changes over the run: a weight or a temperature of the objective with a schedule of its own."""

import math
from enum import Enum

from distill.config.model import Settings, setting


class Shape(Enum):
    """How a number goes from its start to its end."""

    linear = "linear"
    cosine = "cosine"  # half a cosine: slow at both ends


class WeightSchedule(Settings):
    """From `start` at the beginning of the run to `end` at its end; every value lies between the two."""

    start: float = setting(..., "Value at the beginning of the run.")
    end: float = setting(..., "Value at the end of the run.")
    shape: Shape = setting(Shape.linear, "A straight line, or half a cosine, which is slow at both ends.")

    def __call__(self, progress: float) -> float:
        """Its value at `progress` of the run, from 0 to 1."""
        if self.shape is Shape.cosine:
            progress = 0.5 * (1.0 - math.cos(math.pi * progress))
        return self.start + (self.end - self.start) * progress


def value_at(number: float | WeightSchedule, progress: float) -> float:
    """What a number is at `progress` of the run, scheduled or not."""
    return number(progress) if isinstance(number, WeightSchedule) else number


def ends_of(number: float | WeightSchedule) -> tuple[float, float]:
    """What a number is at the beginning and at the end of the run."""
    return (number.start, number.end) if isinstance(number, WeightSchedule) else (number, number)


def is_zero(number: float | WeightSchedule) -> bool:
    """Whether a number is 0 all the time."""
    return ends_of(number) == (0.0, 0.0)
