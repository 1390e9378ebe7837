"""A learning rate that falls as a power of what is left of the run; power 1 is the straight line of BERT and ALBERT."""

import math

from distill.optim.schedules import Decay


class Polynomial(Decay):
    def __init__(
        self,
        warmup: float = 0.05,
        warmup_steps: int | None = None,
        floor: float = 0.0,
        end_lr: float | None = None,
        power: float = 1.0,
        *,
        total_steps: int | None = None,
        peak_lr: float = 1.0,
    ) -> None:
        """`power`: 1 is a line, above 1 falls sooner, below 1 later. Raises ValueError where it is not above 0."""
        super().__init__(warmup, warmup_steps, floor, end_lr, total_steps=total_steps, peak_lr=peak_lr)
        if not 0 < power < math.inf:
            raise ValueError(f"power={power} must be above 0 and finite")
        self.power = power

    def height(self, progress: float) -> float:
        return max(1.0 - progress, 0.0) ** self.power
