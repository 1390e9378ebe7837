"""Dynamic loss scaling: keeps gradients in fp16 between what underflows to 0 and what overflows to infinity.

The loss is multiplied by the scale before backward, and the gradient divided by it before clipping. Infinite gradients
show that the scale is too large: the step is left out and the scale halved; after many good steps it is doubled
(Micikevicius et al. 2018, "Mixed Precision Training", section 3.2). Scales are powers of 2, so nothing is rounded by
them. Gradients are summed over the ranks before they are looked at: what overflows on one rank does on all, and all
scale alike.
"""

from dataclasses import dataclass

START, SMALLEST, LARGEST = 2.0**16, 1.0, 2.0**24
GROWTH_INTERVAL = 2000  # good steps after which the scale is doubled


@dataclass
class LossScale:
    """The scale in force, which is part of a checkpoint; None where the student's format needs none."""

    value: float | None = None
    good_steps: int = 0  # since the scale last changed

    @property
    def factor(self) -> float:
        return 1.0 if self.value is None else self.value

    def begin(self, scaled: bool) -> None:
        """Start, or resume from a checkpoint, which may be one of another format.

        Args:
            scaled: whether the student's gradients are in fp16.
        """
        if not scaled:
            self.value, self.good_steps = None, 0
        elif self.value is None:
            self.value = START

    def update(self, loss_is_finite: bool, gradient_is_finite: bool) -> bool:
        """Adapt the scale after a step; whether that step was lost to the scale.

        It was not where a smaller scale cannot help: at the smallest, and where the loss itself is not finite, which is
        measured without the scale.
        """
        if self.value is None or not loss_is_finite:
            return False
        if not gradient_is_finite:
            lost = self.value > SMALLEST
            self.value, self.good_steps = max(self.value / 2, SMALLEST), 0
            return lost
        self.good_steps += 1
        if self.good_steps >= GROWTH_INTERVAL:
            self.value, self.good_steps = min(self.value * 2, LARGEST), 0
        return False
