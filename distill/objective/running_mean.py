"""Running means of the loss terms by name, over the steps of a log line or between two evaluations."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

TOKENS = "tokens"  # beside the terms' own counts: non-padding positions


@dataclass
class RunningMean:
    """Sums of the terms and of their counts over the steps that were taken; one is part of a checkpoint."""

    sums: dict[str, float] = field(default_factory=dict)
    counts: dict[str, float] = field(default_factory=dict)
    tokens: int = 0  # of all steps, also of those that were skipped
    weighted: dict[str, float] = field(default_factory=dict)  # the sums times the weights of their steps

    def add(self, sums: dict[str, float], counts: dict[str, float], weights: dict[str, float]) -> None:
        """Take in a step with the weights in force in it."""
        weighted = {name: weights[name] * value for name, value in sums.items()}
        for totals, of_step in ((self.sums, sums), (self.counts, counts), (self.weighted, weighted)):
            for name, value in of_step.items():
                totals[name] = totals.get(name, 0.0) + value

    def means(self, names: Iterable[str]) -> dict[str, float]:
        """`total` and the mean of every term; nan without positions, as when all steps were skipped."""
        counted = [name for name in names if self.counts.get(name)]
        means = {name: self.sums[name] / self.counts[name] if name in counted else math.nan for name in names}
        total = sum(self.weighted[name] / self.counts[name] for name in counted)
        return {"total": total if any(self.counts.values()) else math.nan, **means}
