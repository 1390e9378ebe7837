"""A learning rate that stays as it is: the only schedule with which a finished run can be continued."""

from distill.optim.schedules import Warmup


class Constant(Warmup):
    def after(self, progress: float) -> float:
        return 1.0
