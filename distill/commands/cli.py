"""The command `distill`, also `python -m distill`: the main job, or the command that the first argument names."""

import logging
import multiprocessing
import os
import re
import resource
import sys
import textwrap
import traceback
from itertools import takewhile
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from distill.commands.arguments import table
from distill.commands.ending import expected, is_rank, report_problem, status_of
from distill.config import CONF, RECIPES
from distill.config.command_line import CommandLine, check_one_run, check_overrides, options_of, run_dir
from distill.runtime.errors import Interrupted, SettingError, did_you_mean
from distill.runtime.host import keep_compiled_kernels, limit_spinning, quiet_libraries

if TYPE_CHECKING:
    from distill.config.compose import ComposedRun

# By name, where its `HELP` and `run` are, and what it does. A line here is all that a further one needs.
COMMANDS = {
    "evaluate": ("distill.commands.small:EVALUATE", "score models on evaluation sets, without training"),
    "compare": ("distill.commands.small:COMPARE", "compare runs: the settings in which they differ, and their results"),
    "predict": ("distill.commands.predict", "predict with a trained model: texts, files and pipes"),
    "generate": ("distill.commands.generate", "write completions of prompts, a corpus for objective=clm"),
    "prepare": ("distill.commands.prepare", "tokenize and pack the sequences of a corpus, without training"),
    "profile": ("distill.commands.small:PROFILE", "train the first steps of a run and name the bottleneck"),
    "export": ("distill.commands.export", "write a student in the format of another engine (ONNX)"),
    "push": ("distill.commands.push", "upload the student of a run to the Hugging Face Hub, with its card and report"),
    "report": ("distill.commands.small:REPORT", "write the report of a finished run again"),
    "settings": ("distill.commands.small:SETTINGS", "show every setting with its unit, its meaning and who set it"),
}
HELP = """
usage: distill [+recipe=NAME] [GROUP=OPTION ...] [SETTING=VALUE ...]     distil a teacher into a student and report
       distill COMMAND [NAME=VALUE ...]                                  another command; distill COMMAND --help

  distill corpus.path=BOOKS                         the main job on your books, in a minute or two, offline
  distill +recipe=NAME optimizer.lr=2e-3 seed=1     a recipe with other settings
  distill objective.temperature=1,2,4 --multirun    a sweep: one run for each value
  distill settings +recipe=NAME                     show all settings and who set them, and run nothing

A run is written to runs/RECIPE (or hydra.run.dir=FOLDER). The same command resumes it; once it has finished, that
command prints the path of the report.
python -m distill is the same as distill.
"""
OPTIONS = """
options:
  --config-dir FOLDER   recipes of your own, in FOLDER/recipe/NAME.yaml
  --multirun, -m        run every combination of the values that are given as A,B,C
  --cfg job             show the settings as YAML
  --schema              a JSON schema of all settings, by which editors complete recipes
  --help, -h            print this text
  --version             print the version
"""
LONGEST = 88  # characters of the summary of a recipe
MIN_ADDRESSES = 1_200_000_000  # bytes: torch and transformers alone take 1 GB
BROKEN_PIPE = 141  # 128 + SIGPIPE: whoever reads the output has ended
ONE_PROCESS = "each run of --multirun is one process: take backend=single, or start the runs one by one"


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0 done, 2 bad input, 3 diverged, 4 another rank lost, 74 storage, 128 + a signal; else a bug."""
    return status_of(run, sys.argv[1:] if arguments is None else arguments)


def run(words: list[str]) -> int | None:
    """Answer --help and the like, or run what the words name. Raises SettingError where that is no command."""
    name, rest = named_command(words)
    if name and name not in COMMANDS:
        raise _no_command(name, rest)
    try:
        if answers(name, words):
            sys.stdout.flush()
            return 0
        addresses = resource.getrlimit(resource.RLIMIT_AS)[0]
        if addresses != resource.RLIM_INFINITY and addresses < MIN_ADDRESSES:  # C libraries would abort
            needed = f"torch alone takes {MIN_ADDRESSES // 1024} kB: raise it, or set it to unlimited"
            raise SettingError(f"not enough memory: `ulimit -v` is {addresses // 1024} kB, and {needed}")
        limit_spinning()
        if name:
            status: int | None = command(name).run(rest)
            return status
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Python would fail again when it flushes what is left
        return BROKEN_PIPE
    return main_job(words)


def named_command(words: list[str]) -> tuple[str, list[str]]:
    """The command that the words name, if they name one, and its arguments; --config-dir may stand before it."""
    before = 2 if words[:1] in (["--config-dir"], ["-cd"]) else 0
    before = 1 if words and words[0].startswith(("--config-dir=", "-cd=")) else before
    name = next(iter(words[before:]), "")
    return (name, words[:before] + words[before + 1 :]) if re.fullmatch(r"[a-z]\w*", name) else ("", words)


def answers(name: str, words: list[str]) -> bool:
    """Print --help, --version or --schema where the words ask for it; whether they did."""
    if {"-h", "--help"} & set(words):
        print(command(name).HELP.strip() if name else main_help(config_dir(words)))
        return True
    if words == ["--version"]:
        from distill.runtime.version import __version__

        print(__version__)
        return True
    if words == ["--schema"]:
        from distill.config.schema import print_schema

        print_schema()
        return True
    return False


def command(name: str) -> Any:
    """What has the `HELP` and `run` of a command: a module, or a `Command` in one."""
    return resolve_name(COMMANDS[name][0])


def _no_command(name: str, arguments: list[str]) -> SettingError:
    if name in options_of("recipe", config_dir(arguments)):
        return SettingError(f"{name} is a recipe and not a command: give +recipe={name}")
    nearest = did_you_mean(name, COMMANDS)
    return SettingError(f"{name} is not a command{nearest}: give one of {', '.join(COMMANDS)}, or NAME=VALUE")


def main_job(arguments: list[str]) -> int:
    """One run, a chain of runs or a sweep; the exit status, of a sweep that of the first run that failed."""
    from distill.config.compose import compose, run_of

    keep_compiled_kernels()
    quiet_libraries()
    line = CommandLine.of(arguments)
    check_overrides(line)
    shows_job = line.options.get("--cfg") == "job" and "--package" not in line.options
    if line.shows and not shows_job:
        from distill.commands.sweep import by_hydra

        by_hydra(line, lambda _: None)
        return 0
    composition = compose(line)
    is_sweep = composition.sweeps or "--multirun" in line.options
    if not is_sweep:
        check_one_run(line)
    if shows_job:
        from distill.config.written import as_yaml

        print(as_yaml(composition.settings, "--resolve" in line.options), end="")
        return 0
    if is_sweep:
        from distill.commands.sweep import run_sweep

        if is_rank():
            raise SettingError(ONE_PROCESS)
        return run_sweep(line, composition, run_of_sweep)
    folder = Path(os.path.abspath(composition.folder))
    if (chain := composition.chain) is not None:
        from distill.commands.chain import run_chain

        searched = [text for text in line.overrides if text.startswith("hydra.searchpath=")]
        print(run_chain(chain, folder, [*line.config_dir, *searched]))
        return 0
    job = run_of(composition)._replace(folder=folder)
    if (status := start_ranks(job, composition.folder_has_time)) is not None:
        return status
    try:
        train(job)
    except Exception as error:
        failure = expected(error, str(folder))
        if failure is None or failure is error:
            raise
        raise failure from error
    return 0


def start_ranks(job: "ComposedRun", names_folder: bool = False) -> int | None:
    """Run this command as every rank, and give its exit status; None in a process that is to run the job itself.

    `names_folder`: whether the command names the run folder for the ranks, each of which would find another one.
    """
    from distill.distributed import launch
    from distill.runs.check import check

    backend = job.config.backend
    if backend.name == "single":
        return None
    check(job.config, job.folder)
    if launch.should_launch(backend):
        folder = [run_dir(job.folder)] if names_folder else []
        return launch.launch(backend, [sys.executable, *sys.orig_argv[1:], *folder])
    launch.keep_log(job.folder)
    return None


def train(job: "ComposedRun", direction: str | None = None) -> float | None:
    """Run a job in this process; returns the number of its results that `optimize` names, None where it names none.

    Args:
        direction: in which a search wants that number.
    """
    from distill.config.settings import OnUsr1
    from distill.job import run_job
    from distill.report.comparison.columns import Goal
    from distill.runtime.signals import in_force

    in_force().on_usr1(job.config.train.on_usr1 is OnUsr1.stop)
    goal = Goal.of(job.config.optimize, direction)
    # With its direction, which the run checks before it trains.
    results = run_job(*job._replace(config=job.config.changed(optimize=goal)))
    if goal is None:
        return None
    value = goal.value(results)
    shown = "no number" if value is None else f"{value:.6g}"
    logging.getLogger("distill").info(f"optimize: {goal.name} = {shown}")
    return value


def run_of_sweep(settings: Any) -> float | None:
    """One run of a sweep, in this process or in one of a launcher's; returns the number that a search optimizes.

    Args:
        settings: as Hydra has composed them for this run.

    Raises:
        RunFailed: it ended by an error, which is reported here, as launchers keep it until all runs have ended.
    """
    import torch

    from distill.commands.sweep import RunFailed
    from distill.config.compose import of_job, run_of
    from distill.distributed.launch import should_launch
    from distill.runtime.signals import handled

    if multiprocessing.get_start_method(allow_none=True) == "loky":  # of joblib; our own processes do not know it
        multiprocessing.set_start_method(None, force=True)
    composition, threads = of_job(settings), torch.get_num_threads()
    try:
        job = run_of(composition)
        if should_launch(job.config.backend):
            raise SettingError(ONE_PROCESS)
        with handled():
            return train(job, composition.hydra.sweeper.get("direction"))
    except Exception as error:
        failure = expected(error, str(composition.folder))
        if isinstance(failure, Interrupted):
            raise failure from error
        if failure is None:
            traceback.print_exc()
            raise RunFailed(1) from None
        report_problem(str(failure).replace("hydra.run.dir=DIR", "hydra.sweep.dir=DIR"))
        raise RunFailed(failure.status) from None
    finally:
        torch.set_num_threads(threads)  # the next run chooses among all, too


def config_dir(arguments: list[str]) -> str | None:
    """The folder of options of the user's that a command line names, if it names one."""
    for argument, following in zip(arguments, [*arguments[1:], ""], strict=False):
        name, separator, value = argument.partition("=")
        if name in ("--config-dir", "-cd"):
            return os.path.expanduser(value if separator else following)
    return None


def main_help(own: str | None = None) -> str:
    """What `distill --help` prints: the commands, the recipes and the groups of settings, read from their files.

    Args:
        own: a folder of recipes and options of the user's.
    """
    folders = [RECIPES, *([] if own is None else [Path(own) / "recipe"])]
    recipes = {file.stem: _summary(file) for folder in folders for file in sorted(folder.glob("*.yaml"))}
    groups = {
        folder.name: ", ".join(sorted(file.stem for file in folder.glob("*.yaml")))
        for folder in sorted(CONF.iterdir())
        if folder.is_dir()
    }
    commands = {name: text for name, (_, text) in COMMANDS.items()}
    tables = {"commands:": commands, "recipes (+recipe=NAME):": recipes, "groups (GROUP=OPTION):": groups}
    listed = (f"{title}\n{table(rows)}" for title, rows in tables.items())
    return "\n\n".join([HELP.strip(), *listed, OPTIONS.strip()])


def _summary(recipe: Path) -> str:
    """The first sentence of the comment that a recipe begins with."""
    lines = recipe.read_text("utf-8").splitlines()
    comment = takewhile(lambda line: line.startswith("# "), (line for line in lines if not line.startswith("# @")))
    first = re.split(r"(?<=\w)[.:](?:\s|$)", " ".join(line[2:] for line in comment))[0]
    return textwrap.shorten(first, LONGEST, placeholder=" ...")
