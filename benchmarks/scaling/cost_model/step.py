"""Seconds of one step on so many nodes, part by part, and what binds.

micro-batches x compute + optimizer + what is not hidden of the exchanges + the wait for the slowest rank,
or as long as storage takes for the rows of the step, where that is longer.
"""

import math
from dataclasses import dataclass
from statistics import NormalDist

from benchmarks.scaling.cost_model.exchange import BYTES, Fabric, exposed
from benchmarks.scaling.cost_model.machines import Machine
from benchmarks.scaling.cost_model.memory import WIDTHS, needed
from benchmarks.scaling.cost_model.workload import STREAMS, Frozen, Workload

BLOM = 0.375  # of the expected maximum; 3/8 is what Blom recommends for the normal distribution


@dataclass(frozen=True)
class Step:
    """A step in seconds; the parts add up to `total`."""

    compute: float  # forwards and backwards of a rank
    optimizer: float
    exchange: float  # of gradients, what is not hidden behind computing
    gathering: float  # of sharded weights, what is not hidden
    stragglers: float
    storage: float  # what the loop waits for its rows
    transfer: float  # of gradients, hidden or not
    memory: float  # bytes of a GPU that it needs
    fits: bool

    @property
    def total(self) -> float:
        return sum(self.parts.values())

    @property
    def parts(self) -> dict[str, float]:
        return {
            "compute": self.compute + self.optimizer,
            "exchange": self.exchange + self.gathering,
            "stragglers": self.stragglers,
            "storage": self.storage,
        }

    @property
    def binds(self) -> str:
        """`memory` where it does not fit; else the largest part: compute, exchange, stragglers or storage."""
        return max(self.parts, key=lambda name: self.parts[name]) if self.fits else "memory"


def expected_maximum(number: int) -> float:
    """The expected largest of so many independent standard normal values, in standard deviations.

    By Blom's formula, the quantile at (n - 3/8) / (n + 1/4) (G. Blom, "Statistical Estimates and Transformed
    Beta-Variables", 1958), which is within 0.02 of the exact value for all n.
    """
    if number < 2:
        return 0.0
    return NormalDist().inv_cdf((number - BLOM) / (number + 1 - 2 * BLOM))


def waiting(seconds: float, jitter: float, micro_batches: int, ranks: int) -> float:
    """Expected seconds that a rank waits before an exchange, as all wait for the slowest.

    Deviations of micro-batches are taken to be independent and normal: over a window they add up like the root of its
    length, so a longer window loses a smaller share of its time.

    Args:
        seconds: that a micro-batch takes on average.
        jitter: standard deviation of that, as a share of it.
        micro_batches: between two exchanges.
    """
    return seconds * jitter * math.sqrt(micro_batches) * expected_maximum(ranks)


def compute_seconds(work: Workload, machine: Machine, rows: float) -> float:
    """Of one micro-batch of so many rows on a rank: the teachers' forwards, the student's forward and backward."""
    teachers = sum(_teacher_seconds(work, machine, teacher, rows) for teacher in work.teachers)
    return student_seconds(work, machine, rows) + teachers


def student_seconds(work: Workload, machine: Machine, rows: float) -> float:
    operations = 3 * rows * work.student.operations(work.positions)
    return max(operations / machine.reached[work.precision], 3 * work.student.layers * machine.call)


def _teacher_seconds(work: Workload, machine: Machine, teacher: Frozen, rows: float) -> float:
    operations = rows * teacher.shape.operations(work.positions)
    starts = teacher.shape.layers * machine.call / teacher.micro_batches
    return max(operations / machine.reached[teacher.precision], starts)


def optimizer_seconds(work: Workload, machine: Machine, ranks: int) -> float:
    """Of the visit of gradients, weights and moments; memory sets the pace."""
    held = work.student.parameters / (ranks if work.sharded else 1)
    return 4.0 * STREAMS[work.optimizer] * held / machine.memory_rate


def project_step(work: Workload, machine: Machine, nodes: int) -> Step:
    """A step of the run on so many nodes."""
    ranks = nodes * machine.gpus
    micro_batches, rows = work.window(ranks)
    one = compute_seconds(work, machine, rows)
    compute, optimizer = micro_batches * one, optimizer_seconds(work, machine, ranks)
    fabric = Fabric(nodes, machine.gpus, machine.inside, machine.between, machine.trees)
    transfer, exchange = _gradients(work, machine, fabric, micro_batches, rows)
    gathering = _weights(work, machine, fabric, micro_batches, rows)
    stragglers = _stragglers(work, machine, one, micro_batches, ranks)
    rest = compute + optimizer + exchange + gathering + stragglers
    memory = needed(work, ranks, rows)
    return Step(
        compute=compute,
        optimizer=optimizer,
        exchange=exchange,
        gathering=gathering,
        stragglers=stragglers,
        storage=max(0.0, storage_seconds(work, machine, nodes) - rest),
        transfer=transfer,
        memory=memory,
        fits=memory <= machine.memory,
    )


def storage_seconds(work: Workload, machine: Machine, nodes: int) -> float:
    """Until every node has read its rows of a step."""
    return work.rows_per_step / nodes * work.row_bytes / machine.storage


def _gradients(work: Workload, machine: Machine, fabric: Fabric, micro_batches: int, rows: int) -> tuple[float, float]:
    """Seconds of the exchanges of gradients in a step, and what of it is not hidden behind the backward."""
    if fabric.size == 1:
        return 0.0, 0.0
    if work.sharded:  # each rank gets the sum of its part alone, in fp32
        once = fabric.gather(4.0 * work.student.parameters, work.student.blocks + 1)
    else:
        once = fabric.all_reduce(BYTES[work.wire] * work.student.parameters)
    exchanges = micro_batches if work.sync == "every" else 1
    backward = 2 / 3 * student_seconds(work, machine, rows)
    overlap = machine.overlap if work.overlaps else 0.0
    return exchanges * once, exchanges * exposed(once, backward, overlap, work.student.blocks + 1)


def _weights(work: Workload, machine: Machine, fabric: Fabric, micro_batches: int, rows: int) -> float:
    """Seconds that sharded weights are waited for in a step: for each forward, and for the student's backward.

    The student's blocks are gathered for forward and backward of each micro-batch, what is outside of them once; the
    teacher's blocks for each of its forwards, and what is outside of them stays.
    """
    if fabric.size == 1 or not work.sharded:
        return 0.0
    shape = work.student
    num_bytes = WIDTHS[work.precision] * float(2 * shape.in_blocks + shape.outside)
    beside, pieces = student_seconds(work, machine, rows), 2 * shape.blocks + 1
    seconds = micro_batches * exposed(fabric.gather(num_bytes, pieces), beside, machine.overlap, pieces)
    for teacher in work.teachers:
        joined = min(teacher.micro_batches, micro_batches)
        num_bytes = WIDTHS[teacher.precision] * float(teacher.shape.in_blocks or teacher.shape.parameters)
        beside = joined * _teacher_seconds(work, machine, teacher, rows)
        pieces = max(1, teacher.shape.blocks)
        forwards = -(-micro_batches // joined)
        seconds += forwards * exposed(fabric.gather(num_bytes, pieces), beside, machine.overlap, pieces)
    return seconds


def _stragglers(work: Workload, machine: Machine, one: float, micro_batches: int, ranks: int) -> float:
    """Ranks wait for the slowest at every exchange."""
    if work.sync == "every":
        return micro_batches * waiting(one, machine.jitter, 1, ranks)
    return waiting(one, machine.jitter, micro_batches, ranks)
