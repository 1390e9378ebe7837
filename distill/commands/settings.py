"""The command `distill settings`: every effective setting with its value, unit, meaning and who set it."""

import textwrap
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from distill.runtime.errors import SettingError, did_you_mean

if TYPE_CHECKING:
    from distill.config.explain import Setting

HELP = """
usage: distill settings [NAME ...] [+recipe=NAME] [GROUP=OPTION ...] [SETTING=VALUE ...]

  distill settings                                 those of the main job
  distill settings optimizer train.steps           a part of them
  distill settings +recipe=squad optimizer=lamb    what these would train with

Each has its value and unit, who set it (default, an option, a recipe, the command line) and what it does. A
reference such as ${objective.temperature} is shown as it was given, and no secret is shown. What a run would refuse is
refused here, and what it would not read is left out.

  --config-dir FOLDER   recipes and options of your own
"""
WIDTH = 100
RUN = "run"  # the heading of settings that are in no section


def run(arguments: list[str]) -> None:
    """Print the settings. Raises SettingError for bad input."""
    from distill.config.command_line import CommandLine, check_one_run
    from distill.config.explain import explained
    from distill.runs.check import check

    line = CommandLine.of(arguments)
    if options := [name for name in line.options if name != "--config-dir"]:
        raise SettingError(f"{options[0]}: `distill settings` takes --config-dir alone; leave it out")
    names = [text for text in line.overrides if "=" not in text and not text.startswith(("+", "~"))]
    of_run = CommandLine(line.options, [text for text in line.overrides if text not in names])
    check_one_run(of_run)
    job, settings = explained(of_run)
    check(job.config, job.folder)
    print("\n".join([f"Settings of the recipe {job.recipe}", *_lines(_chosen(settings, names))]))


def _chosen(settings: Sequence["Setting"], names: Sequence[str]) -> list["Setting"]:
    """The settings of these names, or in sections of these names; all where there is none."""
    chosen = []
    for name in names or [""]:
        part = [setting for setting in settings if not name or f"{setting.name}.".startswith(f"{name}.")]
        if not part:
            sections = dict.fromkeys(setting.name.partition(".")[0] for setting in settings)
            nearest = did_you_mean(name, [*sections, *(setting.name for setting in settings)])
            raise SettingError(f"{name} is no setting or section{nearest}: sections are {', '.join(sections)}")
        chosen += part
    return chosen


def _lines(settings: Sequence["Setting"]) -> Iterator[str]:
    """The settings below a heading for each section."""
    ordered = sorted(settings, key=lambda setting: "." in setting.name)  # the headings come once each
    for section, part in groupby(ordered, key=lambda setting: setting.name.rpartition(".")[0].partition(".")[0]):
        yield f"\n{section or RUN}"
        for setting in part:
            yield from _setting(setting, setting.name.removeprefix(f"{section}."))


def _setting(setting: "Setting", name: str) -> Iterator[str]:
    from distill.config.errors import shown

    value = shown(setting.value).replace("\n", "\\n")
    value = value.lower() if isinstance(setting.value, bool) else value
    unit = f" {setting.unit}" if setting.unit and isinstance(setting.value, int | float) else ""
    head = f"  {name} = {value}{unit}"
    origin = setting.origin.rjust(WIDTH - len(head) - 2)
    if len(head) + 2 + len(origin) <= WIDTH:
        yield f"{head}  {origin}"
    else:
        yield from textwrap.wrap(head, WIDTH, subsequent_indent="      ", drop_whitespace=False)
        yield setting.origin.rjust(WIDTH)
    if setting.sentence:
        yield from textwrap.wrap(setting.sentence, WIDTH, initial_indent="      ", subsequent_indent="      ")
