"""Soft targets: the divergence of the student's distribution over the vocabulary from the teacher's."""

import math
from enum import Enum

from torch import Tensor

from distill.objective import losses
from distill.objective.terms import ALL, VocabularyTerm
from distill.teacher.signal import TopK


class SoftPositions(Enum):
    """Which positions carry soft targets."""

    all = "all"
    masked = "masked"


class Soft(VocabularyTerm):
    """T^2 * KL(softmax(teacher / T) || softmax(student / T)); see `losses.soft`."""

    title = "Soft targets"

    def __init__(self, temperature: float = 2.0, rows: SoftPositions = SoftPositions.all, cutoff: float = 0.0) -> None:
        """`cutoff`: teacher probabilities below it share one tail bucket."""
        if not 0 <= cutoff < 1:
            raise ValueError(f"cutoff={cutoff} must be at least 0 and below 1")
        if not 0 < temperature < math.inf:
            raise ValueError(f"temperature={temperature} must be above 0 and finite")
        self.temperature = self.top_k_temperature = temperature
        self.cutoff = cutoff
        self.rows = ALL if rows is SoftPositions.all else "mlm"

    def losses(self, student: Tensor, teacher: Tensor | TopK | None, targets: Tensor) -> Tensor:
        assert teacher is not None
        if isinstance(teacher, TopK):
            return losses.soft_topk(student, teacher.ids, teacher.log_probs, self.temperature)
        return losses.soft(student, teacher, self.temperature, self.cutoff)
