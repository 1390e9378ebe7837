"""Soft targets: the divergence of the student's distribution over the vocabulary from the teacher's."""

from torch import Tensor

from distill.objective import losses
from distill.objective.terms._distributions import Divergence, SoftPositions
from distill.teacher.distributions import Samples, Sparse, TopK


class Soft(Divergence):
    """T^2 * KL(softmax(teacher / T) || softmax(student / T)), the forward divergence; see `losses.soft`."""

    title = "Soft targets"
    reads_samples = True

    def __init__(
        self, temperature: float = 2.0, positions: SoftPositions = SoftPositions.all, cutoff: float = 0.0
    ) -> None:
        """`cutoff`: teacher probabilities below it, from 0 to 1, share one tail bucket."""
        super().__init__(temperature, positions, beta=0.0)
        if not 0 <= cutoff < 1:
            raise ValueError(f"cutoff={cutoff} must be at least 0 and below 1")
        self.top_k_temperature, self.cutoff = self.temperature, cutoff

    def losses(self, student: Tensor, teacher: Tensor | Sparse | None, targets: Tensor) -> Tensor:
        assert teacher is not None
        if isinstance(teacher, TopK):
            return losses.soft_topk(student, teacher.ids, teacher.log_probs, self.temperature)
        if isinstance(teacher, Samples):
            return losses.soft_sampled(student, *teacher, self.temperature)
        return losses.soft(student, teacher, self.temperature, self.cutoff)
