"""Seconds of one step on so many nodes, part by part, and what binds.

micro-batches x compute + optimizer + what is not hidden of the exchanges + the wait for the slowest rank,
or as long as storage takes for the rows of the step, where that is longer.
"""

from dataclasses import dataclass
from functools import cached_property

from distill.errors import SettingError
from distill.kernels.precision import MIN_SPEEDUP
from distill.project.exchange import BYTES, Fabric, exposed
from distill.project.machines import Machine
from distill.project.memory import WIDTHS, cures, needed
from distill.project.stragglers import waiting
from distill.project.workload import Frozen, Workload


@dataclass(frozen=True)
class Step:
    """A step in seconds; the parts add up to `total`."""

    compute: float  # forwards and backwards of a rank
    optimizer: float
    exchange: float  # of gradients, what is not hidden behind computing
    gathering: float  # of divided weights, what is not hidden
    stragglers: float
    storage: float  # what the loop waits for its rows
    transfer: float  # of gradients, hidden or not
    memory: float  # bytes of a GPU that it needs
    fits: bool
    cures: tuple[str, ...]  # settings with which it would fit

    @cached_property
    def total(self) -> float:
        return self.compute + self.optimizer + self.exchange + self.gathering + self.stragglers + self.storage

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


def formats(work: Workload, machine: Machine) -> tuple[str, tuple[str, ...]]:
    """The number formats of the student and of the teachers on this machine.

    Raises:
        SettingError: it has no rate for one of them.
    """
    return _format(work.precision, machine), tuple(_format(each.precision, machine) for each in work.teachers)


def _format(wanted: str, machine: Machine) -> str:
    known = machine.reached
    if wanted == "auto":
        return "bf16" if known.get("bf16", 0.0) >= MIN_SPEEDUP * known.get("fp32", 0.0) else "fp32"
    if wanted not in known:
        raise SettingError(
            f"machine={machine.name} has no rate for {wanted}, only for {', '.join(known)}: set precision="
            f"{next(reversed(known))}, or add it to the machine's rate and share"
        )
    return wanted


def compute_seconds(work: Workload, machine: Machine, rows: float) -> float:
    """Of one micro-batch of so many rows on a rank: the teachers' forwards, the student's forward and backward."""
    student, teachers = formats(work, machine)
    seconds = student_seconds(work, machine, rows, student)
    for teacher, precision in zip(work.teachers, teachers, strict=True):
        seconds += _teacher_seconds(work, machine, teacher, rows, precision)
    return seconds


def student_seconds(work: Workload, machine: Machine, rows: float, precision: str) -> float:
    operations = 3 * rows * work.student.operations(work.positions)
    return max(operations / machine.reached[precision], 3 * work.student.layers * machine.call)


def _teacher_seconds(work: Workload, machine: Machine, teacher: Frozen, rows: float, precision: str) -> float:
    if teacher.cached is not None:
        return 0.0
    operations = rows * teacher.shape.operations(work.positions if work.teacher_head else 0.0)
    return max(operations / machine.reached[precision], teacher.shape.layers * machine.call / teacher.micro_batches)


def optimizer_seconds(work: Workload, machine: Machine, ranks: int) -> float:
    """Of the visit of gradients, weights and moments; memory sets the pace."""
    held = work.student.parameters / (ranks if work.shard_student else 1)
    return 4.0 * work.optimizer_streams * held / machine.memory_rate


def fabric_of(work: Workload, machine: Machine, nodes: int) -> Fabric:
    return Fabric(nodes, machine.gpus, machine.inside, machine.between, machine.trees, work.rings)


def project_step(work: Workload, machine: Machine, nodes: int) -> Step:
    """A step of the run on so many nodes.

    Raises:
        SettingError: a number format that the machine has no rate for.
    """
    ranks = nodes * machine.gpus
    micro_batches, rows = work.window(ranks)
    student, teachers = formats(work, machine)
    one = compute_seconds(work, machine, rows)
    compute, optimizer = micro_batches * one, optimizer_seconds(work, machine, ranks)
    fabric = fabric_of(work, machine, nodes)
    transfer, exchange = _gradients(work, machine, fabric, micro_batches, rows, student)
    gathering = _weights(work, machine, fabric, micro_batches, rows, (student, *teachers))
    stragglers = _stragglers(work, machine, one, micro_batches, ranks)
    rest = compute + optimizer + exchange + gathering + stragglers
    memory = needed(work, ranks, rows, student, teachers)
    fits = memory <= machine.memory
    return Step(
        compute=compute,
        optimizer=optimizer,
        exchange=exchange,
        gathering=gathering,
        stragglers=stragglers,
        storage=max(0.0, storage_seconds(work, machine, nodes) - rest),
        transfer=transfer,
        memory=memory,
        fits=fits,
        cures=() if fits else tuple(cures(work, machine, ranks, student, teachers)),
    )


def storage_seconds(work: Workload, machine: Machine, nodes: int) -> float:
    """Until every node has read its rows of a step, from storage of its own or from one that all share."""
    own = work.rows_of_step(nodes * machine.gpus) / nodes * work.row_bytes
    rate = machine.storage if machine.shared is None else min(machine.storage, machine.shared / nodes)
    return own / rate


def _gradients(
    work: Workload, machine: Machine, fabric: Fabric, micro_batches: int, rows: int, precision: str
) -> tuple[float, float]:
    """Seconds of the exchanges of gradients in a step, and what of it is not hidden behind the backward."""
    if fabric.size == 1:
        return 0.0, 0.0
    if work.shard_student:  # each rank gets the sum of its part alone, in fp32
        once = fabric.gather(4.0 * work.student.parameters, work.student.blocks + 1)
    else:
        once = fabric.all_reduce(BYTES[work.compression] * work.student.parameters)
    exchanges = micro_batches if work.sync == "every" else 1
    backward = 2 / 3 * student_seconds(work, machine, rows, precision)
    overlap = machine.overlap if work.overlaps else 0.0
    return exchanges * once, exchanges * exposed(once, backward, overlap, work.student.blocks + 1)


def _weights(
    work: Workload, machine: Machine, fabric: Fabric, micro_batches: int, rows: int, precisions: tuple[str, ...]
) -> float:
    """Seconds that divided weights are waited for in a step: for each forward, and for the student's backward.

    The student's blocks are gathered for forward and backward of each micro-batch, what is outside of them once; the
    teacher's blocks for each of its forwards, and what is outside of them stays.
    """
    if fabric.size == 1:
        return 0.0
    student, *teachers = precisions
    seconds = 0.0
    if work.shard_student:
        shape = work.student
        num_bytes = max(WIDTHS[student], 2) * float(2 * shape.in_blocks + shape.outside)
        beside = student_seconds(work, machine, rows, student)
        pieces = 2 * shape.blocks + 1
        seconds += micro_batches * exposed(fabric.gather(num_bytes, pieces), beside, machine.overlap, pieces)
    for teacher, precision in zip(work.teachers, teachers, strict=True):
        if work.shard_teacher and teacher.cached is None:
            joined = min(teacher.micro_batches, micro_batches)
            num_bytes = max(WIDTHS[precision], 2) * float(teacher.shape.in_blocks or teacher.shape.parameters)
            beside = joined * _teacher_seconds(work, machine, teacher, rows, precision)
            pieces = max(1, teacher.shape.blocks)
            forwards = -(-micro_batches // joined)
            seconds += forwards * exposed(fabric.gather(num_bytes, pieces), beside, machine.overlap, pieces)
    return seconds


def _stragglers(work: Workload, machine: Machine, one: float, micro_batches: int, ranks: int) -> float:
    """Ranks wait for the slowest at every exchange."""
    if work.sync == "every":
        return micro_batches * waiting(one, machine.jitter, 1, ranks)
    return waiting(one, machine.jitter, micro_batches, ranks)
