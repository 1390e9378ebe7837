"""Squared error of the logits: the student's own numbers before the softmax against the teacher's."""

from torch import Tensor

from distill.objective import losses
from distill.objective.terms import VocabularyTerm
from distill.objective.terms._distributions import SoftPositions
from distill.teacher.distributions import Sparse


class LogitMse(VocabularyTerm):
    """Mean over the vocabulary of (student - teacher)^2 (Kim et al. 2021); see `losses.logit_mse`.

    It takes no temperature: T^2 times the error of logits that are divided by T is the same for every T.
    """

    title = "Squared error of the logits"
    reads_probabilities = False

    def __init__(self, positions: SoftPositions = SoftPositions.all, center: bool = False) -> None:
        """`center`: compare the logits up to a constant for each position, as no softmax sees it."""
        self.positions = positions.of_term
        self.center = center

    def losses(self, student: Tensor, teacher: Tensor | Sparse | None, targets: Tensor) -> Tensor:
        assert isinstance(teacher, Tensor)
        return losses.logit_mse(student, teacher, self.center)
