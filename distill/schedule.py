"""How long a run is, and its learning rate as a pure function of progress."""

import math

from distill.config import ScheduleConfig, TrainConfig

ENDLESS = 10**9  # steps of a run that only the clock ends


def total_steps(settings: TrainConfig, steps_per_epoch: int) -> int:
    """The number of steps after which the run ends, wall-clock aside: the first limit that is reached."""
    limits = []
    if settings.epochs is not None:
        limits.append(settings.epochs * steps_per_epoch)
    if settings.steps is not None:
        limits.append(settings.steps)
    return min(limits, default=ENDLESS)


def lr_scale(settings: ScheduleConfig, progress: float) -> float:
    """Share of `optimizer.lr` at `progress` in [0, 1] of the run: a linear rise, then the decay to `floor`."""
    if progress < settings.warmup:
        return progress / settings.warmup
    decay = (progress - settings.warmup) / max(1.0 - settings.warmup, 1e-12)
    if settings.kind == "linear":
        height = 1.0 - decay
    elif settings.kind == "cosine":
        height = 0.5 * (1.0 + math.cos(math.pi * decay))
    else:
        height = 1.0
    return settings.floor + (1.0 - settings.floor) * max(height, 0.0)
