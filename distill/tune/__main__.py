"""The command `python -m distill.tune +recipe=NAME [overrides]`: what makes a run faster and leaves its student alone.

It profiles the first steps of the run, tries changes in short trials that take turns, and prints a table of prediction
against measurement with the overrides to use. `tune.steps`, `tune.turns` and `tune.changes` say how long and what.
"""

import logging
import sys
from pathlib import Path
from typing import Any

from distill.commands.ending import status_of
from distill.runtime.errors import SettingError
from distill.runtime.nearest import did_you_mean
from distill.runtime.progress import configure_logging
from distill.tune.table import write
from distill.tune.tuning import KINDS, Plan, Tuning

OWN = ("tune.steps", "tune.turns", "tune.changes")
LEAST_STEPS = 10  # of a trial: the first ones do not count
# What a trial sets itself; given for the run, they do not concern its speed.
DROPPED = ("profile", "profile.enabled", "resume", "hydra.run.dir")


def main() -> int:
    """Exit status: 0 done, 2 bad input, 74 storage, 128 + a signal; else a bug."""
    configure_logging(0)
    if len(sys.argv) == 1 or "--help" in sys.argv:
        print(f"{__doc__}\ntune.changes is a list of {', '.join(KINDS)}; all of them by default")
        return 0
    return status_of(tune)


def tune() -> None:
    """Try what the command line names, and print and write the table."""
    from distill.config.command_line import CommandLine, check_one_run
    from distill.config.compose import register

    plan = plan_of(sys.argv[1:])
    register()
    check_one_run(CommandLine.of(plan.arguments))
    tuning = Tuning(plan)
    tuning.run()
    text = write(tuning)
    logging.getLogger("distill").info(f"Table: {plan.folder / 'tune.md'}")
    print(text)


def plan_of(arguments: list[str]) -> Plan:
    """What the command line asks for. Raises SettingError for a value of the command's own that cannot be."""
    given = {name: value for name, _, value in (each.partition("=") for each in arguments)}
    recipe = given.get("+recipe", "default")
    plan = Plan(
        [each for each in arguments if each.partition("=")[0] not in (*OWN, *DROPPED)],
        Path(given.get("hydra.run.dir", f"runs/{recipe}-tune")),
    )
    for name in given:
        if name.startswith("tune.") and name not in OWN:
            raise SettingError(
                f"{name} is no setting of distill.tune{did_you_mean(name, OWN)}: it has {', '.join(OWN)}"
            )
    plan.steps = _whole(given, "tune.steps", plan.steps, LEAST_STEPS)
    plan.turns = _whole(given, "tune.turns", plan.turns, 1)
    if "tune.changes" in given:
        plan.kinds = tuple(each.strip() for each in given["tune.changes"].strip("[]").split(",") if each.strip())
    for kind in plan.kinds:
        if kind not in KINDS:
            raise SettingError(
                f"tune.changes={kind} is no kind of change{did_you_mean(kind, KINDS)}: choose of {', '.join(KINDS)}"
            )
    return plan


def _whole(given: dict[str, Any], name: str, default: int, least: int) -> int:
    value = given.get(name, str(default))
    if not value.isdecimal() or int(value) < least:
        raise SettingError(f"{name}={value} is no number of at least {least}: give a whole one")
    return int(value)


if __name__ == "__main__":
    sys.exit(main())
