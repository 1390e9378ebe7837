"""A whole run on so many nodes: its hours, what it costs, what binds, and how far that can be wrong."""

from dataclasses import dataclass

from distill.project.machines import Machine, MachineCases
from distill.project.step import Step, compute_seconds, formats, optimizer_seconds, project_step, student_seconds
from distill.project.workload import Workload


@dataclass(frozen=True)
class Range:
    """A number as it is usually, and the least and the most that it may be."""

    usual: float
    least: float
    most: float


@dataclass(frozen=True)
class Run:
    """The run in one case, in seconds."""

    step: Step
    steps: float
    rows_of_step: int
    tokens: float
    start: float
    training: float
    scoring: float
    saving: float
    efficiency: float

    @property
    def seconds(self) -> float:
        return self.start + self.training + self.scoring + self.saving


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
    """The run on so many nodes in one case.

    Raises:
        SettingError: a run whose length is not known, or a number format that the machine has no rate for.
    """
    ranks = nodes * machine.gpus
    step = project_step(work, machine, nodes)
    steps: float | None = work.total_steps(ranks)
    if work.minutes is not None:
        within = 60 * work.minutes / step.total
        steps = within if steps is None else min(steps, within)
    assert steps is not None  # a run without an end is refused
    rows = work.rows_of_step(ranks)
    return Run(
        step=step,
        steps=steps,
        rows_of_step=rows,
        tokens=steps * rows * work.length,
        start=machine.start,
        training=steps * step.total,
        scoring=_scorings(work, steps, ranks) * scoring_seconds(work, machine, ranks),
        saving=steps / work.save_every * work.save_bytes / machine.save,
        efficiency=efficiency(work, machine, nodes, step),
    )


def efficiency(work: Workload, machine: Machine, nodes: int, step: Step) -> float:
    """T(1) / (N T(N)) on N GPUs: T(1) is the time of one GPU for the rows of a step, in full micro-batches.

    Whether it has the memory for them is another question, and so is what it would read them from.
    """
    ranks = nodes * machine.gpus
    full = work.rows_of_step(ranks) / work.batch_size
    alone = full * compute_seconds(work, machine, work.batch_size) + optimizer_seconds(work, machine, 1)
    return min(1.0, alone / (ranks * step.total))


def scoring_seconds(work: Workload, machine: Machine, ranks: int) -> float:
    """Of one scoring of the student on all sets, whose rows the ranks share."""
    rows = work.score_rows * (1 + work.score_copies) / ranks
    return student_seconds(work, machine, rows, formats(work, machine)[0]) / 3  # a forward alone


def _scorings(work: Workload, steps: float, ranks: int) -> float:
    """How often the student is scored; the teachers, at the end, count as one more each."""
    points = 1.0 + len(work.teachers)
    if work.score_every is not None:
        points += steps // work.score_every
    if work.score_epochs and work.corpus_rows is not None:
        points += steps * work.rows_of_step(ranks) // work.corpus_rows
    return points


def project(work: Workload, machine: MachineCases, nodes: int) -> Projection:
    """The run on so many nodes of a machine, with the range that its worst and best case give.

    Raises:
        SettingError: as `project_run`.
    """
    worst, usual, best = (project_run(work, each, nodes) for each in machine.cases())
    hours = Range(usual.seconds / 3600, best.seconds / 3600, worst.seconds / 3600)
    price = [each.price * nodes for each in (machine.usual, machine.best, machine.worst)]
    cost = Range(*(price[n] * value for n, value in enumerate((hours.usual, hours.least, hours.most))))
    found = sorted((worst.efficiency, usual.efficiency, best.efficiency))
    return Projection(machine, nodes, usual, hours, cost, Range(usual.efficiency, found[0], found[-1]))
