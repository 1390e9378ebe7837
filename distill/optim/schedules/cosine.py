"""A learning rate that falls along half a cosine (Loshchilov and Hutter, "SGDR", 2017, without its restarts)."""

import math

from distill.optim.schedules import Decay


class Cosine(Decay):
    def height(self, progress: float) -> float:
        return 0.5 * (1.0 + math.cos(math.pi * progress))
