"""What a step works on, what rides in its one exchange, what comes out of it, and who looks at that.

Shapes: M micro-batches of this rank, T terms of the objective.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from distill.data.batch import Batch
from distill.runs.checkpoint import State
from distill.runs.facts import HistoryPoint
from distill.runtime.signals import ALL


class Window(NamedTuple):
    """The micro-batches of one step, with what the ranks have exchanged about them before it begins."""

    batches: list[Batch]  # of this rank, [M]
    counts: Tensor  # [T + 1] float64: positions of each term and tokens, of all ranks, as by `Objective.count`
    clock: float  # seconds of training when the ranks exchanged the counts, on rank 0's clock


class StepStats(NamedTuple):
    """The numbers that ride in the exchange of a step, summed over all ranks.

    As float32 the counts are exact up to 16.7 M positions a step.
    """

    sums: list[float]  # of each term over the step, [T]
    next_counts: list[float]  # of the next window, [T + 1]
    requests: list[float]  # how many ranks have received each signal, in the order of `signals.ALL`
    clock: float  # seconds of training on rank 0; the other ranks add 0

    @staticmethod
    def pack(sums: Tensor, next_counts: Tensor, requests: Sequence[float], clock: float) -> Tensor:
        """This rank's numbers as one vector, on the device of `sums`: [2 T + 1 + len(ALL) + 1]."""
        return torch.cat([sums, sums.new_tensor([*next_counts.tolist(), *requests, clock])])

    @classmethod
    def unpack(cls, values: list[float], num_terms: int) -> "StepStats":
        """The vector of `pack` after the exchange, by name; `num_terms` is T."""
        counts_end = 2 * num_terms + 1
        assert len(values) == counts_end + len(ALL) + 1
        return cls(values[:num_terms], values[num_terms:counts_end], values[counts_end:-1], values[-1])


@dataclass(frozen=True)
class StepResult:
    """What one step computed and exchanged. All ranks have the same, but for what is marked as this rank's."""

    sums: dict[str, float]  # of each term over the step
    counts: dict[str, float]  # positions of each term, and tokens
    weights: dict[str, float]  # of the terms, in force in this step
    rank_sums: Tensor  # this rank's, by micro-batch, [M, T]
    norm: float  # of the whole gradient, before it is clipped
    lr: float
    loss_scale: float | None  # in force in this step; None: none is needed
    seconds: float  # this rank's, of the whole step
    data_wait: float  # seconds that this rank waited for the next window
    exchanges: int  # of gradients
    upcoming: Window  # that of the next step; its batches are this rank's
    over: bool  # whether the run ends with this step
    stop: int | None  # the signal that ends the run after this step
    save_requested: bool  # whether a signal has requested a checkpoint
    diverged: str = ""  # why the run ends as one that has diverged, which `Health` decides

    @property
    def loss_is_finite(self) -> bool:
        return math.isfinite(sum(self.sums.values()))

    @property
    def should_save(self) -> bool:
        """Whether a signal has requested a checkpoint of this step, or the end of the run after it."""
        return self.save_requested or self.stop is not None

    @property
    def finite(self) -> bool:
        """Whether loss and gradient are; else no weight was changed."""
        return self.loss_is_finite and math.isfinite(self.norm)


class Follower:
    """Follows a training; the loop calls its followers in their order, and all ranks call each method."""

    def after_step(self, state: State, result: StepResult) -> None:
        """After each step, before the step's checkpoint; `state` has the step already."""

    def at_checkpoint(self, state: State, folder: Path) -> None:
        """After a checkpoint was written into `folder`."""

    def at_evaluation(self, state: State, point: HistoryPoint) -> None:
        """After each point of the history; once more for the same step after a resume from its checkpoint."""


class History(Protocol):
    """Takes the losses, and scores the student, at the points of the history."""

    def due(self, step: int) -> bool:
        """Whether there is a point after so many steps; the end of a run is always one."""
        ...

    def at_point(self, state: State, epochs: float, losses: dict[str, float]) -> HistoryPoint | None:
        """Called after the checkpoint of each point, and once more for the same step after a resume from there.

        Args:
            epochs: how many are done.
            losses: `total` and the mean of each term since the point before.

        Returns:
            The point, the same on all ranks but for its seconds; None where the history keeps none.
        """
        ...
