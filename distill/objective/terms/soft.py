"""Soft targets: the divergence of the student's distribution over the vocabulary from the teacher's."""

import math
from enum import Enum

from torch import Tensor

from distill.objective import losses
from distill.objective.terms import ALL, TARGETS, VocabularyTerm
from distill.teacher.distributions import Samples, Sparse, TopK


class SoftPositions(Enum):
    """Which positions carry soft targets."""

    all = "all"  # every non-padding position
    masked = "masked"  # those that were masked
    targets = "targets"  # those with a token to predict, masked or next


def where(positions: SoftPositions) -> str:
    """What `VocabularyTerm.positions` calls them."""
    return ALL if positions is SoftPositions.all else TARGETS


class TeacherDistribution(VocabularyTerm):
    """A loss between the distributions of student and teacher at one temperature, which its own class computes."""

    def __init__(self, temperature: float = 2.0, positions: SoftPositions = SoftPositions.all) -> None:
        if not 0 < temperature < math.inf:
            raise ValueError(f"temperature={temperature} must be above 0 and finite")
        self.temperature = temperature
        self.positions = where(positions)


class Soft(TeacherDistribution):
    """T^2 * KL(softmax(teacher / T) || softmax(student / T)), the forward divergence; see `losses.soft`."""

    title = "Soft targets"
    reads_samples = True

    def __init__(
        self, temperature: float = 2.0, positions: SoftPositions = SoftPositions.all, cutoff: float = 0.0
    ) -> None:
        """`cutoff`: teacher probabilities below it share one tail bucket."""
        super().__init__(temperature, positions)
        if not 0 <= cutoff < 1:
            raise ValueError(f"cutoff={cutoff} must be at least 0 and below 1")
        self.top_k_temperature = self.temperature
        self.cutoff = cutoff

    def losses(self, student: Tensor, teacher: Tensor | Sparse | None, targets: Tensor) -> Tensor:
        assert teacher is not None
        if isinstance(teacher, TopK):
            return losses.soft_topk(student, teacher.ids, teacher.log_probs, self.temperature)
        if isinstance(teacher, Samples):
            return losses.soft_sampled(student, *teacher, self.temperature)
        return losses.soft(student, teacher, self.temperature, self.cutoff)
