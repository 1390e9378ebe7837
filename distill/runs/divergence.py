"""Finds out whether a training has diverged, by its losses, its weights and its scores."""

import math
from dataclasses import dataclass, field

import numpy as np
import torch

from distill.data.batch import Batch
from distill.distributed import Ranks
from distill.distributed.shard import local
from distill.objective.objective import Objective
from distill.runtime.progress import counted
from distill.teacher.output import Teacher, is_finite

# What the first loss of a term counts as at least: some start where they lose next to nothing, as a student that is a
# copy of its teacher does, and lose more than three times that ever after.
LEAST_FIRST = 1.0
MEMORY = 0.9  # how much of the mean of the losses stays in each step: it spans about ten of them
PERPLEXITIES = ("perplexity", "pseudo_perplexity")
NAMED_SEQUENCES = 8  # of each rank, where a loss is not finite


@dataclass
class LossLevel:
    """How the loss of late compares with that of the first step; one is part of a checkpoint.

    Losses are compared as multiples of the first step's under the weights in force, so that a weight which rises along
    the run is not taken for a loss that does. A mean of several steps stands for the loss, because a batch of few
    sequences can lose several times the usual amount.
    """

    first: dict[str, float] = field(default_factory=dict)  # mean of each term in the first step that had any of it
    ratio: float = 0.0  # the loss of late by that of the first step
    high_in_a_row: int = 0  # steps since the ratio passed its limit
    # The last step whose own loss was sane, too. A loss is that of the weights before its step, so that
    # a checkpoint of an earlier step is known to be good, and that of this step is not.
    sane_step: int = 0

    def add(
        self,
        step: int,
        sums: dict[str, float],
        counts: dict[str, float],
        weights: dict[str, float],
        limit: float | None,
    ) -> str | None:
        """Take in a step that was finite.

        Args:
            step: its number, from 1.
            sums, counts: of each term over the step and all ranks.
            weights: of the terms in this step.
            limit: the largest ratio that counts as sane; None: any.

        Returns:
            A warning, in the step that passes the limit and in the one that comes back; else None.
        """
        means = {name: value / counts[name] for name, value in sums.items() if counts.get(name)}
        for name, mean in means.items():
            self.first.setdefault(name, mean)
        usual = sum(abs(weights[name]) * max(abs(self.first[name]), LEAST_FIRST) for name in means)
        ratio = 0.0
        if usual:
            ratio = max(0.0, sum(weights[name] * mean for name, mean in means.items()) / usual)
            self.ratio = ratio if self.ratio == 0 else MEMORY * self.ratio + (1 - MEMORY) * ratio
        before, self.high_in_a_row = self.high_in_a_row, 0 if _is_sane(self.ratio, limit) else self.high_in_a_row + 1
        if not self.high_in_a_row and _is_sane(ratio, limit):
            self.sane_step = step
        if before == 0 and self.high_in_a_row:
            return (
                f"the loss is {self.ratio:.3g} times that of the first step (train.max_loss_ratio={limit}); until it "
                "comes back, checkpoints do not count as good"
            )
        if before and not self.high_in_a_row:
            times = f"{self.ratio:.3g} times that of the first step"
            return f"the loss has come back to {times}, after {counted(before, 'step')}"
        return None


def _is_sane(ratio: float, limit: float | None) -> bool:
    return limit is None or ratio <= limit


def offending_sequences(parts: torch.Tensor, window: list[Batch], ranks: Ranks) -> str:
    """Name the sequences of the micro-batches whose loss is not finite; of all of them where every loss is.

    All ranks call it together, for a step that none of them takes.

    Args:
        parts: sums of the terms in each micro-batch of this rank, [M, T].
    """
    good = parts.isfinite().all(dim=1).tolist()
    ranks_with = ranks.sum(torch.tensor([float(not all(good))]))
    rows = [batch.row_ids for batch, is_good in zip(window, good, strict=True) if not is_good or not ranks_with]
    numbers = np.concatenate(rows) if rows else np.zeros(0, np.int64)
    table = torch.zeros(ranks.size, 1 + NAMED_SEQUENCES, dtype=torch.float64)
    table[ranks.rank, 0] = len(numbers)
    here = numbers[:NAMED_SEQUENCES]
    table[ranks.rank, 1 : 1 + len(here)] = torch.from_numpy(here.astype(np.float64))
    descriptions = []
    for rank, line in enumerate(ranks.sum(table).tolist()):
        count = int(line[0])
        if count:
            shown = ", ".join(str(int(number)) for number in line[1 : 1 + min(count, NAMED_SEQUENCES)])
            more = f" and {count - NAMED_SEQUENCES} more" if count > NAMED_SEQUENCES else ""
            descriptions.append(f"{shown}{more}" + (f" of rank {rank}" if ranks.size > 1 else ""))
    return "sequences " + "; ".join(descriptions) if descriptions else "no sequence"


@torch.no_grad()
def teacher_is_finite(teacher: Teacher, objective: Objective, window: list[Batch], ranks: Ranks) -> bool:
    """Whether what the teacher gives for the micro-batches of all ranks is finite; it is computed once more for that.

    All ranks call it together, for a step that none of them takes.
    """
    with ranks.computing():
        finite = [is_finite(output) for output in teacher.outputs(window, objective.teacher_spec)]
    return not float(ranks.sum(torch.tensor(float(not all(finite)))))


def weights_are_finite(tensors: dict[str, torch.Tensor]) -> bool:
    """Whether every weight is a number, of sharded ones this rank's part; integer buffers always are."""
    return all(bool(local(tensor).isfinite().all()) for tensor in tensors.values() if tensor.is_floating_point())


def diverged_scores(scores: dict[str, dict[str, float | None]], vocabulary: int, limit: float | None) -> list[str]:
    """The scores that no student has that learned anything, as `measure on set = value`.

    That is one that is no number, and a perplexity whose logarithm is more than `limit` times that of guessing, which
    is the size of the vocabulary: the last steps of a run have no later loss that would show what they did.

    Args:
        scores: by measure, then by set; None where they come from a file of JSON, which has no other word for them.
        limit: `train.max_loss_ratio`; None: any finite score will do.
    """
    most = math.inf if limit is None else limit * math.log(max(vocabulary, 2))
    return [
        f"{measure} on {name} = {'no number' if value is None else value}"
        for measure, by_set in scores.items()
        for name, value in by_set.items()
        if value is None or not math.isfinite(value) or (measure in PERPLEXITIES and math.log(max(value, 1.0)) > most)
    ]
