"""The fastest and the cheapest of many projections, within limits of time and money."""

from collections.abc import Iterable
from dataclasses import dataclass

from distill.errors import SettingError
from distill.project.machines import MachineCases
from distill.project.run import Projection, project
from distill.project.workload import Workload

GPUS = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)  # of the table of one machine
FEW = (8, 64, 512, 4096)  # of the table of several
EQUAL = 1.01  # nobody rents twice the nodes to be a second earlier


@dataclass(frozen=True)
class Limits:
    """What the user may spend; None: any."""

    hours: float | None = None
    budget: float | None = None

    def hold(self, found: Projection) -> bool:
        """Whether the usual case stays within them."""
        in_time = self.hours is None or found.hours.usual <= self.hours
        return in_time and (self.budget is None or found.cost.usual <= self.budget)


@dataclass(frozen=True)
class Choice:
    """The best of what was asked for; None where nothing fits into memory and limits."""

    fastest: Projection | None
    cheapest: Projection | None


def project_all(
    work: Workload, machines: Iterable[MachineCases], nodes: tuple[int, ...] | None = None, gpus: tuple[int, ...] = GPUS
) -> tuple[list[Projection], list[str]]:
    """Every machine with every number of nodes; and a line for each machine that cannot run it.

    Args:
        nodes: of each machine; None: as many as have these numbers of GPUs.

    Raises:
        SettingError: no machine can, or the length of the run is not known.
    """
    work.total_steps(1)
    found: list[Projection] = []
    left_out: list[str] = []
    for machine in machines:
        own = machine.usual.gpus
        numbers = nodes or tuple(number // own for number in gpus if number >= own)
        try:
            found += _of_machine(work, machine, numbers)
        except SettingError as error:
            left_out.append(str(error))
    if not found:
        raise SettingError(left_out[0])
    return found, left_out


def _of_machine(work: Workload, machine: MachineCases, numbers: tuple[int, ...]) -> list[Projection]:
    """Those with a row for every GPU.

    Raises:
        SettingError: there is none, or a number format that the machine has no rate for.
    """
    rows, own = work.rows_per_step, machine.usual.gpus
    filled = [number for number in numbers if rows is None or rows >= number * own]
    if not filled:
        raise SettingError(
            f"train.rows_per_step={rows} leaves GPUs of {numbers[0]} x {machine.name} without a row: give it "
            f"{numbers[0] * own} or more"
        )
    return [project(work, machine, number) for number in filled]


def choose(projections: Iterable[Projection], limits: Limits) -> Choice:
    """The fastest and the cheapest that fit; of those within a hundredth of it the cheaper and the faster."""
    fitting = [each for each in projections if each.fits and limits.hold(each)]
    hours = min((each.hours.usual for each in fitting), default=0.0)
    cost = min((each.cost.usual for each in fitting), default=0.0)
    fast = [each for each in fitting if each.hours.usual <= EQUAL * hours]
    cheap = [each for each in fitting if each.cost.usual <= EQUAL * cost]
    return Choice(
        min(fast, key=lambda each: each.cost.usual, default=None),
        min(cheap, key=lambda each: each.hours.usual, default=None),
    )
