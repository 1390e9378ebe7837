"""Seconds that ranks take to exchange gradients and divided weights, from what links carry.

A ring allreduce moves every byte twice, except each rank's own share (Patarasuk and Yuan, "Bandwidth optimal all-reduce
algorithms for clusters of workstations", 2009); gathering and scattering are its two halves. Rings pass through all
GPUs of a node before they leave it, so a node's link to others carries these bytes once, whatever number of GPUs it
has, and the slowest link on the way sets the pace. Between many nodes a library with trees (NCCL since 2.4; Sanders,
Speck and Träff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan", 2009) passes fewer messages
after each other, at the same bandwidth.
"""

import math
from dataclasses import dataclass

BYTES = {"fp32": 4, "none": 4, "bf16": 2, "fp16": 2}  # of a gradient on the wire; none: not compressed


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


@dataclass(frozen=True)
class Link:
    """What connects GPUs of a node, or nodes: bytes a second in each direction, and seconds of a message on its way."""

    rate: float
    latency: float


@dataclass(frozen=True)
class Fabric:
    """The GPUs that exchange: so many nodes of so many each, and the links in and between nodes."""

    nodes: int
    gpus: int  # of a node
    inside: Link
    between: Link
    trees: bool = False  # between nodes, as NCCL has them

    @property
    def size(self) -> int:
        return self.nodes * self.gpus

    @property
    def rate(self) -> float:
        """Bytes a second of the slowest link that a ring passes."""
        rates = [self.inside.rate] * (self.gpus > 1)
        rates += [self.between.rate] * (self.nodes > 1)
        return min(rates, default=math.inf)

    @property
    def latency(self) -> float:
        """Seconds of the messages that follow each other while something goes round once."""
        hops = math.ceil(math.log2(self.nodes)) if self.trees else self.nodes - 1
        return (self.gpus - 1) * self.inside.latency + hops * self.between.latency

    def gather(self, num_bytes: float, times: int = 1) -> float:
        """Seconds until every rank has all of what each has a part of; scattering sums takes as long.

        Args:
            num_bytes: of the whole.
            times: collectives that these bytes are divided into, such as one for each block.
        """
        if self.size == 1:
            return 0.0
        return (self.size - 1) / self.size * num_bytes / self.rate + times * self.latency

    def all_reduce(self, num_bytes: float) -> float:
        """Seconds until every rank has the sum of all: scattered first, then gathered."""
        return 2 * self.gather(num_bytes)


def exposed(seconds: float, beside: float, overlap: float, pieces: int = 1) -> float:
    """What of a transfer is not hidden behind computing that takes place beside it.

    Args:
        seconds: of the transfer.
        beside: seconds of computing that may go on meanwhile.
        overlap: share of these that the transfer can use; 0: none, as where the processor is the network.
        pieces: the transfer comes in; the first of them always has to be waited for where there are several.
    """
    hidden = min(overlap * beside, seconds * (1 - 1 / pieces) if pieces > 1 else seconds)
    return seconds - hidden
