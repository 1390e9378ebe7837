"""The command `distill profile`: the first steps of a run, and a table of where their time goes."""

import sys

from pydantic import Field

from distill.commands.arguments import Arguments, split
from distill.config.model import STEPS
from distill.runtime.errors import SettingError

HELP = """
usage: distill profile [+recipe=NAME] [SETTING=VALUE ...] [steps=40]

Train the first steps of a run with torch.profiler, print where their time goes, and name the bottleneck with the
setting that helps. The run ends there, without student or report.

  SETTING=VALUE    as of the run itself
  steps=N          steps to train (40); the table covers all, the bottleneck leaves out the first ones, which compile

The table, the times of every step and the traces, for chrome://tracing or ui.perfetto.dev, lie in profile/ of
runs/RECIPE-profile (hydra.run.dir=FOLDER). Whole runs are profiled with profile=on.

  distill profile +recipe=distilbert_gutenberg corpus.path=BOOKS
"""
FOLDER = "hydra.run.dir=runs/${oc.select:hydra.runtime.choices.recipe,default}-profile"
SET_HERE = {"profile": "leave it out", "profile.enabled": "leave it out", "profile.stop_after": "give steps=N"}


class Request(Arguments):
    """What the command takes besides the settings of a run."""

    steps: int = Field(40, ge=1, le=STEPS)


def run(arguments: list[str]) -> None:
    """Profile what the command line names; ends the process with the status of that run.

    Raises:
        SettingError: a setting that this command makes itself.
    """
    from distill.commands.main_job import main

    request, settings = split(Request, arguments, "profile")
    names = [setting.partition("=")[0] for setting in settings]
    for name in names:
        if name in SET_HERE:
            raise SettingError(f"{name} is set by `distill profile`: {SET_HERE[name]}")
    settings = [setting for setting in settings if setting != "hydra.mode=RUN"]  # of a printed command
    if sweeps := [name for name in names if name in ("--multirun", "-m")]:
        raise SettingError(f"{sweeps[0]} makes several runs, and `distill profile` profiles one: leave it out")
    folder = [] if "hydra.run.dir" in names else [FOLDER]
    # Of a recipe that searches its settings as they are.
    overrides = ["profile=on", f"profile.stop_after={request.steps}", "tracker=none", "hydra.mode=RUN", *folder]
    sys.exit(main([*settings, *overrides]))
