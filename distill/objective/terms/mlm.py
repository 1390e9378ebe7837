"""Masked language modelling: the cross-entropy of the tokens that were masked."""

from torch import Tensor

from distill.objective import losses
from distill.objective.terms import TARGETS, VocabularyTerm
from distill.teacher.distributions import Sparse


class Mlm(VocabularyTerm):
    """Cross-entropy at temperature 1; see `losses.mlm`."""

    title = "Masked tokens (MLM)"
    needs_teacher = False
    task = "mlm"
    positions = TARGETS

    def losses(self, student: Tensor, teacher: Tensor | Sparse | None, targets: Tensor) -> Tensor:
        return losses.mlm(student, targets)
