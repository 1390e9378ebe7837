"""Losses between the distributions of student and teacher: their positions, their temperature, and one divergence."""

import math
from enum import Enum

from torch import Tensor

from distill.objective import losses
from distill.objective.terms import ALL, TARGETS, VocabularyTerm
from distill.teacher.distributions import Sparse


class SoftPositions(Enum):
    """Which positions carry soft targets."""

    all = "all"  # every non-padding position
    masked = "masked"  # those that were masked
    targets = "targets"  # those with a token to predict, masked or next

    @property
    def of_term(self) -> str:
        """What `VocabularyTerm.positions` calls them."""
        return ALL if self is SoftPositions.all else TARGETS


def checked(temperature: float) -> float:
    """Raises ValueError for what logits cannot be divided by."""
    if not 0 < temperature < math.inf:
        raise ValueError(f"temperature={temperature} must be above 0 and finite")
    return temperature


class Divergence(VocabularyTerm):
    """T^2 * (b * KL(p || m) + (1 - b) * KL(q || m)), p the teacher's, q the student's and m = b * p + (1 - b) * q.

    See `losses.divergence`. b = 0 is the forward divergence and b = 1 the reverse one: there the value jumps, since the
    mixture's form goes to 0 towards both ends.
    """

    def __init__(
        self, temperature: float = 2.0, positions: SoftPositions = SoftPositions.all, beta: float = 0.5
    ) -> None:
        """`temperature`: the number by which the logits of both models are divided. `positions`: all that are not
        padding, or those with a token to predict (masked or targets). `beta`: the teacher's weight in the mixture, from
        0 to 1.
        """
        self.temperature, self.positions, self.beta = checked(temperature), positions.of_term, beta
        if not 0 <= beta <= 1:
            raise ValueError(f"beta={beta} is the teacher's weight in the mixture: give a number from 0 to 1")

    def losses(self, student: Tensor, teacher: Tensor | Sparse | None, targets: Tensor) -> Tensor:
        assert isinstance(teacher, Tensor)
        return losses.divergence(student, teacher, self.temperature, self.beta)
