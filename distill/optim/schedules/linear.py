"""A learning rate that falls in a straight line."""

from distill.optim.schedules import Decay


class Linear(Decay):
    def height(self, progress: float) -> float:
        return 1.0 - progress
