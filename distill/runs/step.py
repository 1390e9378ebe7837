"""What a step works on, what rides in its one exchange, what comes out of it, and what a callback may do with that.

Shapes: M micro-batches of this rank, T terms of the objective.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from distill.data.batch import Batch
from distill.objective.running_mean import RunningMean
from distill.runs.facts import HistoryPoint
from distill.runs.on_policy import Samples


class Window(NamedTuple):
    """The micro-batches of one step, with what the ranks have exchanged about them before it begins."""

    batches: list[Batch]  # of this rank, [M]
    counts: Tensor  # [T + 1] float64: positions of each term and tokens, of all ranks, as by `Objective.count`
    clock: float  # seconds of training when the ranks exchanged the counts, on rank 0's clock


class StepStats(NamedTuple):
    """The numbers that ride in the exchange of a step, summed over all ranks; as float32 exact up to 16.7 million."""

    sums: list[float]  # of each term over the step, [T]
    next_counts: list[float]  # of the next window, [T + 1]
    requests: list[float]  # how many ranks have received each signal, in the order of `signals.ALL`
    num_writing: float  # how many ranks still write a checkpoint of an earlier step
    clock: float  # seconds of training on rank 0; the other ranks add 0

    @staticmethod
    def pack(sums: Tensor, next_counts: Tensor, requests: Sequence[float], is_writing: bool, clock: float) -> Tensor:
        """This rank's numbers as one vector, on the device of `sums`: [2 T + 1 + len(ALL) + 2]."""
        numbers = torch.tensor([*next_counts.tolist(), *requests, is_writing, clock], dtype=sums.dtype)
        return torch.cat([sums, numbers.to(sums.device, non_blocking=True)])

    @classmethod
    def unpack(cls, values: list[float], num_terms: int) -> "StepStats":
        """The vector of `pack` after the exchange, by name; `num_terms` is T."""
        end = 2 * num_terms + 1
        return cls(values[:num_terms], values[num_terms:end], values[end:-2], *values[-2:])


@dataclass(frozen=True)
class StepResult:
    """What one step computed and exchanged. All ranks have the same, but for what is marked as this rank's.

    Attributes:
        step: its number, from 1, also over earlier starts of the run.
        epoch: passes over the corpus by then.
        tokens: seen by then, of all ranks, without padding.
        sums: of each term over the step.
        counts: positions of each term in the step, and tokens.
        weights: of the terms, in force in this step.
        batches: this rank's micro-batches, [M].
        rank_sums: this rank's sums, by micro-batch, [M, T].
        lr: the learning rate of the step.
        grad_norm: of the whole gradient, before it was clipped.
        loss_scale: in force in this step; None: none is needed.
        seconds: this rank's, of the whole step.
        data_wait: seconds that this rank waited for the next window.
        over: whether the run ends with this step.
        stop: the signal that ends the run after this step.
        save_requested: whether a signal has requested a checkpoint.
        writing: whether any rank still writes a checkpoint of an earlier step.
        diverged: why the run ends as one that has diverged.
        samples: what the student has written for this step; None: it has learned from the corpus.
    """

    step: int
    epoch: float
    tokens: int
    sums: dict[str, float]
    counts: dict[str, float]
    weights: dict[str, float]
    batches: list[Batch]
    rank_sums: Tensor
    lr: float
    grad_norm: float
    loss_scale: float | None
    seconds: float
    data_wait: float
    over: bool
    stop: int | None
    save_requested: bool
    writing: bool
    diverged: str = ""
    samples: Samples | None = None

    @property
    def losses(self) -> dict[str, float]:
        """`total`, the weighted sum, and the mean of each term, without its weight; nan where it had no position."""
        mean = RunningMean()
        mean.add(self.sums, self.counts, self.weights)
        return mean.means(self.sums)

    @property
    def loss_is_finite(self) -> bool:
        """Whether the sums of all terms are."""
        return math.isfinite(sum(self.sums.values()))

    @property
    def skipped(self) -> bool:
        """Whether loss or gradient was not finite, so that no weight was changed."""
        return not (self.loss_is_finite and math.isfinite(self.grad_norm))


class Callback:
    """Looks on while a run trains. The loop calls its callbacks in their order, and all ranks call each method."""

    def after_step(self, step: StepResult) -> None:
        """Called after each step, before its checkpoint."""

    def at_evaluation(self, evaluation: HistoryPoint) -> None:
        """Called after the student was scored; once more for the same step after a resume from its checkpoint."""

    def at_checkpoint(self, folder: Path) -> None:
        """Called once a checkpoint is whole in `folder`, with `train.async_checkpoints` some steps after its own.

        `train.keep` says how long it stays.
        """
