"""Soft targets at a share of the positions: for rows of `ablation.py`, which says how they compare."""

from abc import abstractmethod

import torch
from torch import Tensor

from distill.objective.terms.soft import Soft
from distill.teacher.distributions import Sparse


class SoftAtShare(Soft):
    """Soft targets at `share` of the positions that are computed at once, whose mean the term is.

    It saves no time: the logits of all positions are there before it chooses.
    """

    def __init__(self, share: float, temperature: float = 1.0) -> None:
        """
        Raises:
            ValueError: a share that is none.
        """
        if not 0 < share <= 1:
            raise ValueError(f"share={share} of the positions must be above 0 and at most 1")
        super().__init__(temperature)
        self.share = share

    @abstractmethod
    def order(self, student: Tensor) -> Tensor:
        """Student logits [n, V] -> [n]; the positions with the largest values are taken."""

    def losses(self, student: Tensor, teacher: Tensor | Sparse | None, targets: Tensor) -> Tensor:
        order = self.order(student.detach())
        count = max(1, round(self.share * len(order)))
        weights = torch.zeros_like(order)
        weights[order.topk(count).indices] = len(order) / count
        return super().losses(student, teacher, targets) * weights


class SoftAtRandom(SoftAtShare):
    """At positions that are drawn anew in every step."""

    title = "Soft targets at random positions"

    def order(self, student: Tensor) -> Tensor:
        return torch.rand(len(student), device=student.device)


class SoftAtEntropy(SoftAtShare):
    """Where the student is least sure: the largest entropy of its distribution (after arXiv 2602.01395)."""

    title = "Soft targets at the student's highest entropy"

    def order(self, student: Tensor) -> Tensor:
        log_q = student.float().log_softmax(-1)
        return -(log_q.exp() * log_q).sum(-1)
