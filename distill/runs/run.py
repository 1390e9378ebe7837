"""What a run is made of once its folder is open."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from distill.config.settings import Config, EvaluateConfig
from distill.distributed import Ranks
from distill.objective.objective import Objective
from distill.optim.schedule import Limits
from distill.runs.facts import Baseline
from distill.runs.identity import Identity
from distill.runs.pair import Pair
from distill.runs.run_folder import RunFolder
from distill.tasks import Prepared, Task


def scores_on_the_way(settings: EvaluateConfig) -> bool:
    """Whether the student is scored in the course of the training, or at its end alone."""
    return (settings.every_steps, settings.every_epoch) != (None, False)


@dataclass(frozen=True)
class Run:
    """A run that is about to train: all that the loop, those who follow it, and the evaluation at its end have.

    Attributes:
        config: with a value in place of every `auto`.
        formats: number formats and threads in force, which checkpoints keep for a resume.
        pair: teachers and student, on this rank.
        data: what it trains on, and is scored on.
        identity: what the trained student depends on.
        baseline: that `evaluate.baseline` names.
    """

    config: Config
    formats: dict[str, Any]
    task: Task
    pair: Pair
    data: Prepared
    objective: Objective
    identity: Identity
    baseline: Baseline | None
    folder: RunFolder
    ranks: Ranks

    @cached_property
    def limits(self) -> Limits:
        """What ends it."""
        return Limits.of(self.config.train, self.data.batches.steps_per_epoch)

    @property
    def steps(self) -> int:
        """After which the run ends, wall-clock aside; `ENDLESS` where the clock alone ends it."""
        return self.limits.steps

    @property
    def scored_on_the_way(self) -> int | None:
        """How many sequences of each set are scored in the course of the training, where these are not all."""
        settings, longest = self.config.evaluate, max((len(one.sequences) for one in self.data.sets), default=0)
        few = settings.on_the_way.sequences
        return few if few is not None and few < longest and scores_on_the_way(settings) else None
