"""The command `python -m distill.project +recipe=... nodes=...`: time, cost and what binds, before renting anything."""

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from distill.ending import status_of
from distill.errors import SettingError

USAGE = """usage: python -m distill.project +recipe=NAME [SETTING=VALUE ...] [--config-dir DIR]
  with settings as `python -m distill` takes them, and besides
  nodes=N[,N...]     numbers of nodes; without it, those of a table from 8 to 4,096 GPUs
  machine=NAME[,...] machines of the file; without it, all of them that have GPUs
  machines=PATH      a YAML file of yours, which adds machines or changes them (distill/project/machines.yaml)
  tokens=NUMBER      of the corpus, where neither corpus.rows nor train.steps says how long a run is
  hours=NUMBER       the longest, and
  budget=NUMBER      the most expensive run that may be named the fastest or the cheapest"""


@dataclass
class Request:
    """What the command line says beside the settings of the run."""

    overrides: list[str] = field(default_factory=list)
    config_dir: str | None = None
    nodes: tuple[int, ...] | None = None
    machine: str | None = None
    machines: str | None = None
    tokens: float | None = None
    hours: float | None = None
    budget: float | None = None


def parse(arguments: list[str]) -> Request:
    """Raises SettingError for a value of these that is none."""
    request, rest = Request(), list(arguments)
    while rest:
        argument = rest.pop(0)
        name, separator, value = argument.partition("=")
        if argument in ("--config-dir", "-cd") and rest:
            request.config_dir = rest.pop(0)
        elif name == "--config-dir":
            request.config_dir = value
        elif argument.startswith("-"):
            raise SettingError(f"{argument} is no option of this command: see python -m distill.project --help")
        elif separator and name == "nodes":
            request.nodes = _nodes(value)
        elif separator and name in ("tokens", "hours", "budget"):
            setattr(request, name, _positive(name, value))
        elif separator and name in ("machine", "machines"):
            setattr(request, name, value)
        else:
            request.overrides.append(argument)
    return request


def _nodes(value: str) -> tuple[int, ...]:
    found = tuple(int(each) if each.strip().isdecimal() else 0 for each in value.split(","))
    if min(found) < 1:
        raise SettingError(f"nodes={value} is no number of nodes: give 1 or more, or several as nodes=1,2,4")
    return found


def _positive(name: str, value: str) -> float:
    try:
        number = float(value.replace("_", ""))
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise SettingError(f"{name}={value} is no such number: give one above 0")
    return number


def settings(request: Request) -> Any:
    """The run's composed settings as `distill.config.Config`.

    Raises:
        SettingError: settings that no run could have.
    """
    from hydra import compose, initialize_config_dir

    from distill.command_line import check_overrides
    from distill.compose import build, chain_config, register
    from distill.config import CONF

    options = [] if request.config_dir is None else ["--config-dir", request.config_dir]
    register()
    check_overrides([*request.overrides, *options])
    folder = [] if request.config_dir is None else [f"'file://{Path(request.config_dir).absolute()}'"]
    with initialize_config_dir(str(CONF), version_base="1.3"):
        composed = compose("config", [*request.overrides, f"hydra.searchpath=[{','.join(folder)}]"])
    if chain_config(composed, []) is not None:
        raise SettingError("this recipe is a chain of runs: project its stages one by one, +recipe=NAME")
    return build(composed, request.overrides)


def check_settings(config: Any) -> None:
    """As before a run, but for what lies on this machine's disks."""
    from distill.checks.objective import check_objective
    from distill.checks.ranges import check_ranges
    from distill.checks.student import check_student
    from distill.checks.teachers import check_teachers
    from distill.checks.training import check_training

    check_ranges(config)
    check_objective(config)
    check_teachers(config)
    check_training(config)
    check_student(config.student)


def answer(request: Request) -> str:
    """What the command prints."""
    from distill.project import choose, machines, table
    from distill.project.workload import workload_of

    known = machines.load(request.machines)
    wanted = machines.choose(known, request.machine or "all")
    config = settings(request)
    check_settings(config)
    work = workload_of(config, request.tokens)
    gpus = choose.GPUS if len(wanted) == 1 else choose.FEW
    found, left_out = choose.project_all(work, wanted, request.nodes, gpus)
    limits = choose.Limits(request.hours, request.budget)
    return table.report(work, found, left_out, choose.choose(found, limits), limits, wanted)


def main(arguments: list[str]) -> int:
    """Exit status: 0 done, 2 bad input, 74 storage, 128 + a signal; else a bug."""
    if not arguments or {"--help", "-h"} & set(arguments):
        print(USAGE)
        return 0 if arguments else SettingError.status
    return status_of(lambda: print(answer(parse(arguments))))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
