"""The figures that all rules read, taken from the records of all ranks: R ranks, N steps, P phases."""

from functools import cached_property
from typing import Any

import numpy as np

from distill.runs.profile.phases import CHECKPOINT, EVALUATION, EXCHANGE, PHASES
from distill.runs.profile.record import RankProfile, RunProfile

OUTLIER = 2.0  # times the median, above which a step is one


class Figures:
    """Means over the typical steps: without the first ones, those that were traced, and outliers.

    Attributes:
        times: seconds by rank, step and phase, [R, N, P], in the steps that all ranks have.
    """

    def __init__(self, profile: RunProfile) -> None:
        self.profile, self.settings, self.ranks = profile, profile.settings, profile.ranks
        count = self._count = min(len(rank.steps) for rank in self.ranks)
        left_out = {number - len(rank.steps) + count for rank in self.ranks for number in rank.left_out}
        self._counted = [number for number in range(count) if number not in left_out] or list(range(count))
        self.times = np.array([self._of_steps(rank.steps, count) for rank in self.ranks]).reshape(
            len(self.ranks), len(self._counted), len(PHASES)
        )
        exchanges = [self._of_steps(rank.exchanges, count) for rank in self.ranks]
        self._exchanges = np.array(exchanges) if all(exchanges) else np.empty(0)

    def _of_steps(self, values: list[Any], count: int) -> list[Any]:
        newest = values[len(values) - count :]
        return [newest[number] for number in self._counted] if len(newest) == count else []

    @property
    def num_steps(self) -> int:
        return len(self._counted)

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

    def sample(self, name: str, rank: RankProfile, outliers: bool = False) -> float | None:
        """The mean of a sampled quantity of a rank over the time of the typical steps; None where it was not sampled.

        The first steps of a short run, in which little may be wrong yet, would stand for a good part of it.

        Args:
            outliers: also over the steps that take far longer than the others.
        """
        values = rank.samples.get(name)
        if not values:
            return None
        weights = self._sampled_seconds(rank, outliers)
        return float(np.average(values, weights=weights if len(weights) == len(values) and weights.any() else None))

    def _sampled_seconds(self, rank: RankProfile, outliers: bool) -> np.ndarray:
        """How much of the time of each sample of a rank, [samples], lies in the steps that count, without evaluation.

        A sample covers the time since the one before it; steps and samples begin together.
        """
        seconds = np.array(rank.steps)  # [steps, P]
        ends = sum(rank.totals.values()) - seconds.sum() + np.cumsum(seconds.sum(1))
        steps = np.array(self._counted) + len(rank.steps) - self._count
        steps = steps if outliers else steps[self.typical]
        spans = seconds[steps].sum(1)
        counted = spans - seconds[steps, PHASES.index(EVALUATION)]
        begins = ends[steps] - spans
        edges = np.stack([begins, begins + counted], 1).reshape(-1)
        before = np.stack([np.cumsum(counted) - counted, np.cumsum(counted)], 1).reshape(-1)
        found: np.ndarray = np.diff(np.interp([0.0, *rank.samples["seconds"]], edges, before))
        return found
