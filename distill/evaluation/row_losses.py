"""What each row of an evaluation set contributes to a perplexity, for what a mean over all tokens cannot say.

Shapes: R rows of the set, N scored tokens of a batch.
"""

from dataclasses import dataclass

import numpy as np
import torch

from distill.distributed import Backend


@dataclass(frozen=True)
class RowLosses:
    """Sums by row: the perplexity of the set is exp(losses.sum() / counts.sum())."""

    losses: np.ndarray  # [R] float64, nats of the row's scored tokens
    counts: np.ndarray  # [R] float64, how many these are


class RowMeter:
    """Adds up the losses of tokens by the row that they stand in, over all ranks."""

    def __init__(self, backend: Backend, num_rows: int) -> None:
        self.backend = backend
        self.sums = torch.zeros(2, num_rows, dtype=torch.float64, device=backend.device)

    def update(self, losses: torch.Tensor, rows: torch.Tensor) -> None:
        """losses [N] float64, and the number in the set of the row of each token, rows [N] int64."""
        self.sums[0].index_add_(0, rows, losses)
        self.sums[1].index_add_(0, rows, torch.ones_like(losses))

    def compute(self) -> RowLosses:
        """The sums over all ranks, which all call this."""
        losses, counts = self.backend.sum(self.sums).cpu().numpy()
        return RowLosses(losses, counts)
