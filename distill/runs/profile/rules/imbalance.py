"""Rule: all ranks wait for one that is slower than the others."""

import numpy as np

from distill.runs.profile.figures import Figures
from distill.runs.profile.finding import Finding, percent
from distill.runs.profile.phases import CHECKPOINT, EVALUATION, EXCHANGE, PHASES, TITLES
from distill.runs.profile.record import RankProfile

NAME = "load imbalance between ranks"
STEADY = 0.6  # share of the steps in which it has to be the slowest; else ranks are slow in turn


def find(figures: Figures) -> Finding | None:
    """Lost is (B1 - B2) / T: B1 is what the slowest rank takes for its own work in a step, B2 the next one.

    Own work is all but the exchange, in which the faster ranks wait. Prediction for a rank as fast as the next one:
    T' = max(T - (B1 - B2), U / c), with U seconds of processors a step of all ranks on its host, and c the cores of
    that host which other programs leave: while a rank is held back, its neighbours have cores that it will take again,
    and no step takes less than all ranks of a host need of these. It has to be the same rank in most of the steps.
    """
    if len(figures.ranks) < 2:
        return None
    own = figures.own[:, figures.typical]
    order = np.argsort(own.mean(1))
    slowest, following = int(order[-1]), int(order[-2])
    if float((own.argmax(0) == slowest).mean()) < STEADY:
        return None
    means = own.mean(1)
    wasted = float(means[slowest] - means[following])
    rank = figures.ranks[slowest]
    sentence = (
        f"All wait for rank {rank.rank} on {rank.host}, whose own work takes {means[slowest] / means[following]:.2f} "
        f"times as long as that of the next slowest: {percent(wasted / figures.step)} of the time, most of it in "
        f"{TITLES[_where(figures, slowest)]}"
    )
    left = max(figures.step - wasted, min(_least_seconds(figures, rank), figures.step))
    gain = figures.step / left
    return Finding(NAME, wasted / figures.step, sentence, _advice(figures, slowest), gain=gain)


def _least_seconds(figures: Figures, rank: RankProfile) -> float:
    """Of a step, as the ranks of this host share its cores; on a GPU none, as processes wait for it in computing."""
    if rank.device != "cpu":
        return 0.0
    neighbours = [each for each in figures.ranks if each.host == rank.host]
    processors = sum(figures.sample("process_cpu", each) or 0.0 for each in neighbours) * figures.step
    return processors / max(rank.cores - figures.foreign_cores(rank), 1.0)


def _where(figures: Figures, slowest: int) -> str:
    """The phase in which a rank loses most against the median of all."""
    own = [phase for phase in PHASES if phase not in (EXCHANGE, CHECKPOINT, EVALUATION)]
    return max(own, key=lambda phase: float(figures.phase(phase)[slowest] - np.median(figures.phase(phase))))


def _advice(figures: Figures, slowest: int) -> str:
    rank = figures.ranks[slowest]
    foreign = figures.foreign_cores(rank)
    taken = f" Other programs take {foreign:.1f} cores of its host." if foreign > 0.5 else ""
    return f"Repair, relieve or leave out that host.{taken}"
