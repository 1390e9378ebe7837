"""How long a step takes by the number of threads that prepare batches, which two rules predict by."""

from dataclasses import dataclass

import numpy as np

from distill.runs.profile.figures import Figures
from distill.runs.profile.phases import DATA

MOST_THREADS = 16
ENOUGH = 1.03  # times the best: further threads are not worth their memory
# What a second thread of a core adds to the first one's speed: 16 to 28 % were measured (Marr et al., "Hyper-Threading
# Technology Architecture and Microarchitecture", Intel Technology Journal 6(1), 2002).
SECOND_THREAD = 0.22


@dataclass
class Preparation:
    """The seconds of a step and of what prepares its batches, on a typical rank.

    Attributes:
        step: of the whole step.
        waited: of that for data.
        prepared: from the beginning to the end of one window, in its thread.
        computed: of that computing, or ready to.
        processors: seconds of processors that the rank takes for a step, all its threads together.
        cores: that the rank can use, as the system counts them.
        threads: that prepare windows; 0: the loop does it.
        threads_of_core: that the system counts as cores, though they share one.
    """

    step: float
    waited: float
    prepared: float
    computed: float
    processors: float
    cores: float
    threads: int
    threads_of_core: int = 1

    @property
    def lost(self) -> float:
        return self.waited / self.step

    @property
    def computing(self) -> float:
        """Share of the preparation that is computing."""
        return self.computed / max(self.prepared, 1e-9)

    def seconds(self, threads: int) -> float:
        """A step with so many threads: max(L, P / n, T X(U / T) / X(c)).

        L is the step T without its wait for data, P what a window takes, n the threads, U the seconds of processors and
        c the cores: n threads give a window every P / n seconds, and no step takes less than all cores together need.
        X(k) is the speed of k busy cores in that of one. It is k, so that the last term is U / c, unless several
        threads of a core count as cores: then each core gets one thread first, and a second one adds little.
        """
        busy = min(self.processors / self.step, self.cores)
        least = self.step * self._speed(busy) / self._speed(self.cores)
        return max(self.step - self.waited, self.prepared / threads, least)

    def _speed(self, busy: float) -> float:
        """Of so many busy cores together, in that of one alone."""
        whole = self.cores / self.threads_of_core
        return min(busy, whole) + SECOND_THREAD * max(busy - whole, 0.0)

    def best_threads(self, most: int) -> int:
        """The fewest threads that are about as good as any number up to `most`."""
        counts = range(max(self.threads, 1), max(self.threads, most, 1) + 1)
        best = min(map(self.seconds, counts))
        return next(count for count in counts if self.seconds(count) <= ENOUGH * best)


def preparation(figures: Figures) -> Preparation | None:
    """Of the rank whose wait for data is the median; None where nothing was prepared."""
    waits = figures.phase(DATA)
    number = int(np.argsort(waits)[len(waits) // 2])
    rank, times = figures.ranks[number], figures.ranks[number].loader
    if not times.windows:
        return None
    processors = figures.sample("process_cpu", rank) or 0.0
    return Preparation(
        step=figures.step,
        waited=float(waits[number]),
        prepared=times.prepared / times.windows,
        computed=times.computed / times.windows,
        processors=processors * figures.step,
        cores=figures.free_cores(rank),
        threads=0 if times.in_loop else times.most_at_once,
        threads_of_core=rank.threads_of_core,
    )
