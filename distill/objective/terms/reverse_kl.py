"""Reverse KL: the divergence of the teacher's distribution over the vocabulary from the student's."""

from distill.objective.terms._distributions import Divergence, SoftPositions


class ReverseKl(Divergence):
    """T^2 * KL(softmax(student / T) || softmax(teacher / T)) (Gu et al. 2024)."""

    title = "Reverse KL"

    def __init__(self, temperature: float = 2.0, positions: SoftPositions = SoftPositions.all) -> None:
        super().__init__(temperature, positions, beta=1.0)
