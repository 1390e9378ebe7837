"""The figures that all rules read, taken from the records of all ranks: R ranks, N steps, P phases."""

from functools import cached_property
from typing import Any

import numpy as np

from distill.profile.phases import CHECKPOINT, EVALUATION, EXCHANGE, PHASES
from distill.profile.record import RankProfile, RunProfile

OUTLIER = 2.0  # times the median, above which a step is one


class Figures:
    """Means over the typical steps: without the first ones, those that were traced, and outliers.

    Attributes:
        times: seconds by rank, step and phase, [R, N, P], in the steps that all ranks have.
    """

    def __init__(self, profile: RunProfile) -> None:
        self.profile, self.settings, self.ranks = profile, profile.settings, profile.ranks
        count = min(len(rank.steps) for rank in self.ranks)
        left_out = {place - len(rank.steps) + count for rank in self.ranks for place in rank.left_out}
        self._places = [place for place in range(count) if place not in left_out] or list(range(count))
        self.times = np.array([self._of_steps(rank.steps, count) for rank in self.ranks]).reshape(
            len(self.ranks), len(self._places), len(PHASES)
        )
        exchanges = [self._of_steps(rank.exchanges, count) for rank in self.ranks]
        self._exchanges = np.array(exchanges) if all(exchanges) else np.empty(0)

    def _of_steps(self, values: list[Any], count: int) -> list[Any]:
        newest = values[len(values) - count :]
        return [newest[place] for place in self._places] if len(newest) == count else []

    @property
    def num_steps(self) -> int:
        return len(self._places)

    @cached_property
    def with_checkpoints(self) -> np.ndarray:
        """Seconds of each step, [N], without evaluation, which is work of another kind; of the slowest rank."""
        kept = [place for place, phase in enumerate(PHASES) if phase != EVALUATION]
        return self.times[:, :, kept].sum(2).max(0)

    @cached_property
    def whole(self) -> np.ndarray:
        """Seconds of the training of each step, [N], without evaluation and checkpoints; of the slowest rank."""
        kept = [place for place, phase in enumerate(PHASES) if phase not in (EVALUATION, CHECKPOINT)]
        return self.times[:, :, kept].sum(2).max(0)

    @cached_property
    def typical(self) -> np.ndarray:
        """Which steps are no outliers, [N]."""
        return self.whole <= OUTLIER * np.median(self.whole)

    @cached_property
    def step(self) -> float:
        """Mean seconds of a typical step."""
        return float(self.whole[self.typical].mean())

    def phase(self, name: str) -> np.ndarray:
        """Mean seconds of a phase in a typical step, by rank, [R]."""
        return self.times[:, self.typical, PHASES.index(name)].mean(1)

    @cached_property
    def own(self) -> np.ndarray:
        """Seconds of each step that a rank does not wait for the others, [R, N]."""
        kept = [place for place, phase in enumerate(PHASES) if phase not in (EVALUATION, CHECKPOINT, EXCHANGE)]
        return self.times[:, :, kept].sum(2)

    @cached_property
    def exchange(self) -> float:
        """Mean seconds that a step stands still for its exchange.

        The rank that comes last waits for no other one, so that its time is that of the exchange itself.
        """
        return float(self.times[:, self.typical, PHASES.index(EXCHANGE)].min(0).mean())

    @cached_property
    def exchange_span(self) -> float:
        """Mean seconds from the beginning of the exchange to its end, of which a part lies beside the backward pass."""
        if self._exchanges.shape != self.times.shape[:2]:
            return self.exchange
        return max(float(self._exchanges[:, self.typical].min(0).mean()), self.exchange)

    def foreign_cores(self, rank: RankProfile) -> float:
        """Cores of a rank's host that other programs take, as a mean."""
        busy = (self.sample("machine_cpu", rank) or 0.0) * (rank.host_cores or rank.cores)
        ranks = [other for other in self.ranks if other.host == rank.host]
        return max(busy - sum(self.sample("process_cpu", other) or 0.0 for other in ranks), 0.0)

    def free_cores(self, rank: RankProfile) -> float:
        """Cores that a rank can use: its share of those of its host that other programs leave, one at least."""
        return max((rank.cores - self.foreign_cores(rank)) / rank.local_ranks, 1.0)

    def sample(self, name: str, rank: RankProfile) -> float | None:
        """The mean of a sampled quantity of a rank; None where it was not sampled."""
        values = rank.samples.get(name)
        return float(np.mean(values)) if values else None
