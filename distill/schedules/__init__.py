"""Learning rates over a run: one file each, found by its name as `schedule.kind`.

A schedule is called with the progress of the run, from 0 to 1, and gives the share of `optimizer.lr` that is in force
there. One of your own is a class whose objects can be called so, or a function that gives such a function, named as
`schedule._target_`; the settings beside it are its arguments. The whole curve is its own, a warm-up included.
"""

from abc import ABC, abstractmethod


class Warmup(ABC):
    """A linear rise from 0 to 1 over the first `warmup` of the run, then `after`."""

    def __init__(self, warmup: float = 0.05) -> None:
        """`warmup`: share of the run. Raises ValueError where it is none."""
        self.warmup = _share("warmup", warmup)

    def __call__(self, progress: float) -> float:
        if progress < self.warmup:
            return progress / self.warmup
        return self.after((progress - self.warmup) / max(1.0 - self.warmup, 1e-12))

    @abstractmethod
    def after(self, progress: float) -> float:
        """The share at `progress`, from 0 to 1, of what follows the rise."""


class Decay(Warmup):
    """The same, then a fall from 1 to `floor` in the shape of `height`."""

    def __init__(self, warmup: float = 0.05, floor: float = 0.0) -> None:
        """`floor`: share that is left at the end of the run."""
        super().__init__(warmup)
        self.floor = _share("floor", floor)

    def after(self, progress: float) -> float:
        return self.floor + (1.0 - self.floor) * max(self.height(progress), 0.0)

    @abstractmethod
    def height(self, progress: float) -> float:
        """From 1 at `progress` 0 to 0 at 1."""


def _share(name: str, value: float) -> float:
    if not 0 <= value <= 1:
        raise ValueError(f"{name}={value} is a share: give a number from 0 to 1")
    return value
