"""Generalised Jensen-Shannon divergence: both distributions over the vocabulary against a mixture of the two."""

from torch import Tensor

from distill.objective import losses
from distill.objective.terms._distributions import SoftPositions, TeacherDistribution
from distill.teacher.distributions import Sparse


class Jsd(TeacherDistribution):
    """T^2 * (b * KL(p || m) + (1 - b) * KL(q || m)), p the teacher's, q the student's and m = b * p + (1 - b) * q.

    Agarwal et al. 2024; see `losses.jensen_shannon`. b = 0 is the forward divergence, that of `soft`, and b = 1 the
    reverse one: there the value jumps, since the mixture's form goes to 0 towards both ends.
    """

    title = "Jensen-Shannon divergence"

    def __init__(
        self, temperature: float = 2.0, positions: SoftPositions = SoftPositions.all, beta: float = 0.5
    ) -> None:
        """`beta`: the teacher's weight in the mixture, from 0 to 1."""
        super().__init__(temperature, positions)
        if not 0 <= beta <= 1:
            raise ValueError(f"beta={beta} is the teacher's weight in the mixture: give a number from 0 to 1")
        self.beta = beta

    def losses(self, student: Tensor, teacher: Tensor | Sparse | None, targets: Tensor) -> Tensor:
        assert isinstance(teacher, Tensor)
        return losses.jensen_shannon(student, teacher, self.temperature, self.beta)
