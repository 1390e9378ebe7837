"""Reverse KL: the divergence of the teacher's distribution over the vocabulary from the student's."""

from torch import Tensor

from distill.objective import losses
from distill.objective.terms._distributions import TeacherDistribution
from distill.teacher.distributions import Sparse


class ReverseKl(TeacherDistribution):
    """T^2 * KL(softmax(student / T) || softmax(teacher / T)) (Gu et al. 2024); see `losses.reverse_kl`."""

    title = "Reverse KL"

    def losses(self, student: Tensor, teacher: Tensor | Sparse | None, targets: Tensor) -> Tensor:
        assert isinstance(teacher, Tensor)
        return losses.reverse_kl(student, teacher, self.temperature)
