"""The commands that take a few arguments and make one call: evaluate, compare, report, profile and settings."""

import textwrap
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from distill.commands.arguments import Arguments, Command, LocalFile, help_of, parse, split
from distill.config.base import STEPS, LocalPath
from distill.config.command_line import CommandLine, check_one_run
from distill.config.errors import shown
from distill.runtime.errors import Damaged, SettingError, did_you_mean, first_line

if TYPE_CHECKING:
    from distill.config.explain import Setting

# --- evaluate ------------------------------------------------------------------------------------------------------


class EvaluateArguments(Arguments):
    """Score models on evaluation sets without training, and compare them in a table.

    A model is a run folder, its student/, a snapshot, any folder of transformers, a name on the Hub, a GGUF file,
    bundled_small or bundled_deep. teacher=MODEL adds a column for a teacher, and each model's top-1 agreement with it.

      distill evaluate model=runs/distilbert_gutenberg model=runs/distilbert_gutenberg_baseline
      distill evaluate model=RUN 'evaluate.sets=[wikitext2,imdb]' evaluate.max_sequences=1000 teacher=bundled_deep
      distill evaluate model=MODEL 'evaluate.sets=[mine]' 'evaluate.sources.mine={kind: text, path: FILE}'
    """

    settings: ClassVar[str] = (
        "a setting of a run, of corpus, data, evaluate, precision, teacher and backend; what is not given is as in the "
        "run that made the first model"
    )
    model: list[LocalPath] = Field(title="MODEL", description="again for each further one, or as model=[A,B]")
    output: LocalFile = Field(Path("runs/evaluate"), title="FOLDER", description="gets scores.json and scores.md")


def evaluate(arguments: list[str]) -> None:
    """Score what the command line names, and print the table."""
    from distill.commands.evaluate import evaluate_models

    options, settings = split(EvaluateArguments, arguments, "evaluate")
    print(evaluate_models(options.model, settings, options.output))
    print(f"\nWritten: {options.output}/scores.json and scores.md")


EVALUATE = Command(help_of(EvaluateArguments, "evaluate"), evaluate)

# --- compare and report --------------------------------------------------------------------------------------------


class CompareArguments(Arguments):
    """Lay runs side by side: the settings in which they differ against their scores, sizes, speeds and times.

    Runs that differ in their seed alone become one line, with the mean and the range.

      distill compare run=runs/distilbert_gutenberg-sweep
      distill compare run=runs/first run=runs/second by=heldout.perplexity
    """

    run: list[LocalPath] = Field(
        title="FOLDER",
        description="a run, a folder of runs, a sweep, or a pattern as 'run=runs/my-*'; again for each further one",
    )
    by: str | None = Field(None, title="NAME", description="the number to order by, such as heldout.perplexity")
    output: LocalFile | None = Field(
        None,
        title="FOLDER",
        description="gets compare.html, .md, .csv and plots/ (default: the folder of a single sweep, else compare/)",
    )
    overwrite: bool = Field(False, description="replace files of these names that another program wrote")


def compare(arguments: list[str]) -> None:
    """Compare the runs, write the page, and print the tables and where it is."""
    from distill.report.comparison.compare import HTML, ComparedRuns
    from distill.report.comparison.runs import find_runs
    from distill.report.page import is_written_here

    options = parse(CompareArguments, arguments, "compare")
    compared = ComparedRuns(find_runs(options.run), options.by, "by")
    only = Path(options.run[0]).expanduser()
    folder = only if len(options.run) == 1 and is_written_here(only / HTML) else Path("compare")
    print(f"{compared}\nComparison: {compared.write(options.output or folder, overwrite=options.overwrite)}")


class ReportArguments(Arguments):
    """Write the report of a finished run again, from its folder: report.html, report.md and plots/."""

    run: LocalFile = Field(title="FOLDER", description="a run folder with results.json")


def report(arguments: list[str]) -> None:
    """Write the report, and print where it is."""
    from distill.report.report import write
    from distill.runs.results_file import read_run
    from distill.runtime.jsonl import read_lines

    folder = parse(ReportArguments, arguments, "report").run
    record, config = read_run(folder, "run"), folder / "config.yaml"
    if not config.is_file():
        raise Damaged(config, "it is no file")
    try:
        settings = config.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise Damaged(config, first_line(error)) from None
    write(folder, record, read_lines(folder / "metrics.jsonl"), settings)
    print(folder / "report.html")


COMPARE = Command(help_of(CompareArguments, "compare"), compare)
REPORT = Command(help_of(ReportArguments, "report"), report)

# --- profile -------------------------------------------------------------------------------------------------------


class ProfileArguments(Arguments):
    """Train the first steps of a run with torch.profiler, print where their time goes, and name the bottleneck with the
    setting that helps. The run ends there, without student or report.

    The table, the times of every step and the traces, for chrome://tracing or ui.perfetto.dev, lie in profile/ of
    runs/RECIPE-profile (hydra.run.dir=FOLDER). Whole runs are profiled with profile=on.

      distill profile +recipe=distilbert_gutenberg corpus.path=BOOKS
    """

    settings: ClassVar[str] = "as of the run itself"
    steps: int = Field(
        40,
        ge=1,
        le=STEPS,
        title="N",
        description="steps to train; the bottleneck leaves out the first ones, which compile",
    )


PROFILE_FOLDER = "hydra.run.dir=runs/${oc.select:hydra.runtime.choices.recipe,default}-profile"
SET_BY_PROFILE = {"profile": "leave it out", "profile.enabled": "leave it out", "profile.stop_after": "give steps=N"}


def profile(arguments: list[str]) -> int:
    """Profile what the command line names; the exit status of that run.

    Raises:
        SettingError: a setting that this command makes itself.
    """
    from distill.commands.cli import main_job

    request, settings = split(ProfileArguments, arguments, "profile")
    names = [setting.partition("=")[0] for setting in settings]
    for name in names:
        if name in SET_BY_PROFILE:
            raise SettingError(f"{name} is set by `distill profile`: {SET_BY_PROFILE[name]}")
        if name in ("--multirun", "-m"):
            raise SettingError(f"{name} makes several runs, and `distill profile` profiles one: leave it out")
    settings = [setting for setting in settings if setting != "hydra.mode=RUN"]  # of a printed command
    folder = [] if "hydra.run.dir" in names else [PROFILE_FOLDER]
    # Of a recipe that searches its settings as they are.
    overrides = ["profile=on", f"profile.stop_after={request.steps}", "tracker=none", "hydra.mode=RUN", *folder]
    return main_job([*settings, *overrides])


PROFILE = Command(help_of(ProfileArguments, "profile"), profile)

# --- settings ------------------------------------------------------------------------------------------------------

SETTINGS_HELP = """
usage: distill settings [NAME ...] [+recipe=NAME] [GROUP=OPTION ...] [SETTING=VALUE ...]

  distill settings                                 those of the main job
  distill settings optimizer train.steps           a part of them
  distill settings +recipe=squad optimizer=lamb    what these would train with

Each has its value and unit, who set it (default, an option, a recipe, the command line) and what it does. A
reference such as ${objective.temperature} is shown as it was given, and no secret is shown. What a run would refuse is
refused here, and what it would not read is left out.

  --config-dir FOLDER   recipes and options of your own
"""
WIDTH, INDENT = 100, " " * 6
OF_THE_RUN = "run"  # the heading of settings that are in no section


def settings(arguments: list[str]) -> None:
    """Print the settings. Raises SettingError for bad input."""
    from distill.config.explain import explained
    from distill.runs.check import check

    line = CommandLine.of(arguments)
    if options := [name for name in line.options if name != "--config-dir"]:
        raise SettingError(f"{options[0]}: `distill settings` takes --config-dir alone; leave it out")
    names = [text for text in line.overrides if "=" not in text and not text.startswith(("+", "~"))]
    of_run = CommandLine(line.options, [text for text in line.overrides if text not in names])
    check_one_run(of_run)
    job, found = explained(of_run)
    check(job.config, job.folder)
    chosen = [setting for name in names or [""] for setting in _of_name(name, found)]
    chosen.sort(key=lambda setting: "." in setting.name)  # the headings come once each
    print(f"Settings of the recipe {job.recipe}")
    for section, part in groupby(chosen, key=lambda setting: setting.name.rpartition(".")[0].partition(".")[0]):
        print(f"\n{section or OF_THE_RUN}")
        print("\n".join(line for setting in part for line in _lines(setting, setting.name.removeprefix(f"{section}."))))


def _of_name(name: str, found: Sequence["Setting"]) -> list["Setting"]:
    """The settings of this name, or in the section of this name; all where it is empty."""
    part = [setting for setting in found if not name or f"{setting.name}.".startswith(f"{name}.")]
    if not part:
        sections = dict.fromkeys(setting.name.partition(".")[0] for setting in found)
        nearest = did_you_mean(name, [*sections, *(setting.name for setting in found)])
        raise SettingError(f"{name} is no setting or section{nearest}: sections are {', '.join(sections)}")
    return part


def _lines(setting: "Setting", name: str) -> Iterator[str]:
    """The name within its section, the value and who set it; below that what it does."""
    value = shown(setting.value).replace("\n", "\\n")
    value = value.lower() if isinstance(setting.value, bool) else value
    unit = f" {setting.unit}" if setting.unit and isinstance(setting.value, int | float) else ""
    *before, head = textwrap.wrap(f"  {name} = {value}{unit}", WIDTH, subsequent_indent=INDENT, drop_whitespace=False)
    fits = len(head) + len(setting.origin) + 2 <= WIDTH
    yield from before
    yield head + setting.origin.rjust(WIDTH - len(head)) if fits else f"{head}\n{setting.origin.rjust(WIDTH)}"
    yield from textwrap.wrap(setting.sentence, WIDTH, initial_indent=INDENT, subsequent_indent=INDENT)


SETTINGS = Command(SETTINGS_HELP, settings)
