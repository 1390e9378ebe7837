"""A whole run on so many nodes: its hours, what it costs, what binds, and how far that can be wrong."""

from collections.abc import Iterable
from dataclasses import dataclass

from benchmarks.scaling.cost_model.machines import Machine, MachineCases
from benchmarks.scaling.cost_model.step import Step, compute_seconds, optimizer_seconds, project_step, student_seconds
from benchmarks.scaling.cost_model.workload import Workload

GPUS = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)  # of a table
HEAD = (
    "GPUs", "rows/step", "s/step", "compute", "exchange", "stragglers", "storage", "binds", "hours", "cost",
    "T(1)/(N T(N))",
)  # fmt: skip


@dataclass(frozen=True)
class Range:
    """A number as it is usually, and the least and the most that it may be."""

    usual: float
    least: float
    most: float

    def __str__(self) -> str:
        return f"{number(self.usual)} ({number(self.least)}-{number(self.most)})"


@dataclass(frozen=True)
class Run:
    """The run in one case, in seconds."""

    step: Step
    start: float
    training: float
    evaluation: float
    saving: float
    efficiency: float

    @property
    def seconds(self) -> float:
        return self.start + self.training + self.evaluation + self.saving


@dataclass(frozen=True)
class Projection:
    """The run on so many nodes of a machine."""

    machine: MachineCases
    nodes: int
    run: Run  # in the usual case
    hours: Range
    cost: Range
    efficiency: Range

    @property
    def gpus(self) -> int:
        return self.nodes * self.machine.usual.gpus

    @property
    def fits(self) -> bool:
        return self.run.step.fits

    @property
    def binds(self) -> str:
        """What a step waits for most; `start` where the run is over before that matters."""
        return "start" if self.fits and self.run.start > self.run.seconds / 2 else self.run.step.binds


def project_run(work: Workload, machine: Machine, nodes: int) -> Run:
    """The run on so many nodes in one case."""
    step = project_step(work, machine, nodes)
    return Run(
        step=step,
        start=machine.start,
        training=work.steps * step.total,
        evaluation=(work.evaluations + len(work.teachers)) * evaluation_seconds(work, machine, nodes * machine.gpus),
        saving=work.steps / work.save_every * work.save_bytes / machine.save,
        efficiency=efficiency(work, machine, nodes, step),
    )


def efficiency(work: Workload, machine: Machine, nodes: int, step: Step) -> float:
    """T(1) / (N T(N)) on N GPUs: T(1) is the time of one GPU for the rows of a step, in full micro-batches.

    Whether it has the memory for them is another question, and so is what it would read them from.
    """
    ranks = nodes * machine.gpus
    full = work.rows_per_step / work.batch_size
    alone = full * compute_seconds(work, machine, work.batch_size) + optimizer_seconds(work, machine, 1)
    return min(1.0, alone / (ranks * step.total))


def evaluation_seconds(work: Workload, machine: Machine, ranks: int) -> float:
    """Of one evaluation on all sets, whose rows the ranks share."""
    rows = work.evaluation_rows * (1 + work.evaluation_copies) / ranks
    return student_seconds(work, machine, rows) / 3  # a forward alone


def project(work: Workload, machine: MachineCases, nodes: int) -> Projection:
    """The run on so many nodes of a machine, with the range that its worst and best case give."""
    worst, usual, best = (project_run(work, case, nodes) for case in machine.cases())
    hours = Range(usual.seconds / 3600, best.seconds / 3600, worst.seconds / 3600)
    cost = Range(
        machine.usual.price * nodes * hours.usual,
        machine.best.price * nodes * hours.least,
        machine.worst.price * nodes * hours.most,
    )
    ordered = sorted((worst.efficiency, usual.efficiency, best.efficiency))
    return Projection(machine, nodes, usual, hours, cost, Range(usual.efficiency, ordered[0], ordered[-1]))


def project_all(work: Workload, machine: MachineCases, gpus: Iterable[int] = GPUS) -> list[Projection]:
    """On as many nodes as have these numbers of GPUs, as long as each GPU has a row of a step."""
    each_node = machine.usual.gpus
    return [project(work, machine, n // each_node) for n in gpus if each_node <= n <= work.rows_per_step]


def number(value: float) -> str:
    """Three digits, and no exponent where people want to compare."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def row(projection: Projection, work: Workload) -> list[str]:
    """A projection as a row below `HEAD`, parts of a step in ms; one that does not fit into memory has no times."""
    place = [f"{projection.gpus:,}", f"{work.rows_per_step:,}"]
    if not projection.fits:
        return [*place, *["-"] * 5, projection.binds, *["-"] * 3]
    step, reached = projection.run.step, projection.efficiency
    parts = [number(1000 * part) for part in step.parts.values()]
    efficiency_text = f"{reached.usual:.0%} ({reached.least:.0%}-{reached.most:.0%})"
    cost = [str(projection.hours), str(projection.cost), efficiency_text]
    return [*place, number(step.total), *parts, projection.binds, *cost]
