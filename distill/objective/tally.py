"""Running means of the loss terms by name, over the steps of a log line or of an epoch."""

import math
from dataclasses import dataclass, field

TOKENS = "tokens"  # beside the terms' own counts: non-padding positions


@dataclass
class Tally:
    """Sums of the terms and of their counts over the steps that were taken; an epoch's is part of a checkpoint."""

    sums: dict[str, float] = field(default_factory=dict)
    counts: dict[str, float] = field(default_factory=dict)
    tokens: int = 0  # of all steps, also of those that were skipped

    def add(self, sums: dict[str, float], counts: dict[str, float]) -> None:
        for own, more in ((self.sums, sums), (self.counts, counts)):
            for name, value in more.items():
                own[name] = own.get(name, 0.0) + value

    def means(self, weights: dict[str, float]) -> dict[str, float]:
        """`total` and the mean of every term; nan without positions, as when all steps were skipped."""
        means = {name: self.sums[name] / self.counts[name] if self.counts.get(name) else math.nan for name in weights}
        total = sum(weight * means[name] for name, weight in weights.items() if self.counts.get(name))
        return {"total": total if any(self.counts.values()) else math.nan, **means}
