"""A learning rate that falls as a power of what is left of the run; power 1 is the straight line of BERT and ALBERT."""

import math
from dataclasses import dataclass

from distill.optim.schedules import Decay


@dataclass
class Polynomial(Decay):
    """A fall as a power of what is left of the run.

    `power`: above 0; 1 is a line, above 1 the rate falls sooner, below 1 later.

    Raises:
        ValueError: as its base, and where the power is not above 0.
    """

    power: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.power < math.inf:
            raise ValueError(f"power={self.power} must be above 0 and finite")

    def height(self, progress: float) -> float:
        return max(1.0 - progress, 0.0) ** self.power
