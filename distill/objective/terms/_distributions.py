"""What losses between the distributions of student and teacher have in common: their positions and temperature."""

import math
from enum import Enum

from distill.objective.terms import ALL, TARGETS, Term, VocabularyTerm


class SoftPositions(Enum):
    """Which positions carry soft targets."""

    all = "all"  # every non-padding position
    masked = "masked"  # those that were masked
    targets = "targets"  # those with a token to predict, masked or next


def where(positions: SoftPositions) -> str:
    """What `VocabularyTerm.positions` calls them."""
    return ALL if positions is SoftPositions.all else TARGETS


def checked(temperature: float) -> float:
    """Raises ValueError for what logits cannot be divided by."""
    if not 0 < temperature < math.inf:
        raise ValueError(f"temperature={temperature} must be above 0 and finite")
    return temperature


class SoftHead(Term):
    """A loss between the distributions of the two models' heads for a task, at one temperature."""

    def __init__(self, temperature: float) -> None:
        """`temperature`: the number by which the logits of both models are divided."""
        self.temperature = checked(temperature)


class TeacherDistribution(VocabularyTerm):
    """A loss between the distributions of student and teacher at one temperature, which its own class computes."""

    def __init__(self, temperature: float = 2.0, positions: SoftPositions = SoftPositions.all) -> None:
        """`temperature`: the number by which the logits of both models are divided. `positions`: all that are not
        padding, or those with a token to predict (masked or targets).
        """
        self.temperature = checked(temperature)
        self.positions = where(positions)
