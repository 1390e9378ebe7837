"""A cost model of data-parallel training on emulated hosts, which benchmarks fit and predict by."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Model:
    """A step on N hosts: seconds (or any unit of time) of compute per micro-batch, and of a ring exchange.

    `transfer` is the time of an exchange between infinitely many: 2 * bytes / bandwidth.
    """

    compute: float
    latency: float
    transfer: float

    def exchange(self, size: int) -> float:
        return 2 * (size - 1) * self.latency + (size - 1) / size * self.transfer

    def step(self, size: int, accumulate: int) -> float:
        return accumulate * self.compute + self.exchange(size)

    def efficiency(self, size: int, accumulate: int) -> float:
        """T(N) / (N T(1)) when every host does the same work per step."""
        return self.step(1, accumulate) / self.step(size, accumulate)
