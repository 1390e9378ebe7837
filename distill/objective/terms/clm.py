"""Causal language modelling: the cross-entropy of the next token."""

from torch import Tensor

from distill.objective import losses
from distill.objective.terms import TARGETS, VocabularyTerm
from distill.teacher.distributions import Sparse


class Clm(VocabularyTerm):
    """Cross-entropy at temperature 1, at positions whose next token counts; see `losses.mlm`."""

    title = "Next token (CLM)"
    task = "clm"
    needs_teacher = False
    positions = TARGETS

    def losses(self, student: Tensor, teacher: Tensor | Sparse | None, targets: Tensor) -> Tensor:
        return losses.mlm(student, targets)
