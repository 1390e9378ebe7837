"""How alike two models are: equal first choices, and the divergence of their distributions.

Shapes: N positions, V vocabulary.
"""

from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric


class Agreement(Metric):
    """At positions with a target: fraction of equal first choices, and mean KL(teacher || student) in nats."""

    is_differentiable, higher_is_better, full_state_update = False, None, False
    sums: Tensor  # [3] float64: equal choices, divergences, and the number of positions

    def __init__(self, **exchange: Any) -> None:
        super().__init__(**exchange)
        self.add_state("sums", torch.zeros(3, dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, student: Tensor, teacher: Tensor) -> None:
        """Add the logits of both models at N positions, [N, V] float32 each."""
        log_q, log_p = student.log_softmax(-1), teacher.log_softmax(-1)
        self.sums[0] += (student.argmax(-1) == teacher.argmax(-1)).sum()
        self.sums[1] += (log_p.exp() * (log_p - log_q)).sum(-1).double().sum()
        self.sums[2] += len(student)

    def compute(self) -> dict[str, float]:
        """`top1`, a fraction, and `kl`, in nats; not numbers without a position."""
        top1, kl, count = self.sums.tolist()
        if not count:
            return {"top1": float("nan"), "kl": float("nan")}
        return {"top1": top1 / count, "kl": kl / count}
