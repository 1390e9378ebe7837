"""The main job: one run, in this process or by the ranks that it starts; a chain of runs; or a sweep."""

import logging
import multiprocessing
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distill.commands.ending import end_rank, expected, is_rank, report_problem, until_interrupted
from distill.runtime.errors import SettingError
from distill.runtime.host import keep_compiled_kernels, limit_spinning, quiet_libraries

if TYPE_CHECKING:
    from distill.config.command_line import CommandLine
    from distill.config.compose import ComposedRun, Composition
    from distill.runtime.signals import Signals

ONE_PROCESS = "each run of --multirun is one process: take backend=single, or start the runs one by one"


def main(arguments: list[str]) -> int:
    """Exit status: 0 done, 2 bad input, 3 diverged, 4 another rank lost, 74 storage, 128 + a signal; else a bug."""
    return until_interrupted(lambda signals: run_command(arguments, signals))


def run_command(arguments: list[str], signals: "Signals") -> int:
    """Run a command line; returns its exit status, of a sweep that of the first run that failed."""
    from distill.commands.sweep import by_hydra, run_sweep
    from distill.config.command_line import CommandLine, check_one_run, check_overrides
    from distill.config.compose import compose
    from distill.config.written import as_yaml

    limit_spinning()
    keep_compiled_kernels()
    quiet_libraries()
    folder = ""
    try:
        line = CommandLine.of(arguments)
        check_overrides(line)
        shown = line.options.get("--cfg") if "--package" not in line.options else None
        if line.shows and shown != "job":
            by_hydra(line, lambda _: None)
            return 0
        composition = compose(line)
        if shown == "job":
            if "--multirun" not in line.options:
                check_one_run(line)
            print(as_yaml(composition.settings, "--resolve" in line.options), end="")
            return 0
        if composition.sweeps or "--multirun" in line.options:
            if is_rank():
                raise SettingError(ONE_PROCESS)
            return run_sweep(line, composition, run_of_sweep)
        folder = str(composition.folder)
        return run_one(line, composition, signals)
    except Exception as error:
        failure = expected(error, folder)
        if failure is None:
            if is_rank():
                traceback.print_exc()
                end_rank(1, error)
            raise
        report_problem(failure)
        end_rank(failure.status, error)
        return failure.status


def run_one(line: "CommandLine", composition: "Composition", signals: "Signals") -> int:
    """Run what was composed: one run, or a chain of them."""
    from distill.config.command_line import check_one_run
    from distill.config.compose import run_of

    check_one_run(line)
    folder = Path(os.path.abspath(composition.folder))
    if (chain := composition.chain) is not None:
        from distill.commands.chain import run_chain
        from distill.runtime.progress import configure_logging

        if is_rank():
            raise SettingError(
                "a chain starts its stages itself: run it as one process, with backend=ddp backend.processes=N in the "
                "settings of its stages"
            )
        configure_logging(0)
        searched = [text for text in line.overrides if text.startswith("hydra.searchpath=")]
        print(run_chain(chain, folder, [*line.config_dir, *searched]))
        return 0
    job = run_of(composition)._replace(folder=folder)
    if (status := start_ranks(job, composition.folder_has_time)) is not None:
        return status
    train(job, signals)
    end_rank(0)
    return 0


def run_of_sweep(settings: Any) -> float | None:
    """One run of a sweep, in this process or in one of a launcher's; returns the number that a search optimizes.

    Args:
        settings: as Hydra has composed them for this run.

    Raises:
        RunFailed: it ended by an error, which is reported here, as launchers keep it until all runs have ended.
    """
    from distill.commands.sweep import RunFailed
    from distill.config.compose import of_job, run_of
    from distill.distributed.launch import should_launch
    from distill.runtime.signals import handled

    if multiprocessing.get_start_method(allow_none=True) == "loky":  # of joblib; our own processes do not know it
        multiprocessing.set_start_method(None, force=True)
    folder = ""
    try:
        composition = of_job(settings)
        folder = str(composition.folder)
        job = run_of(composition)
        if should_launch(job.config.backend):
            raise SettingError(ONE_PROCESS)
        with handled() as signals, threads_as_before():
            return train(job, signals, composition.hydra.sweeper.get("direction"))
    except Exception as error:
        failure = expected(error, folder)
        if failure is None:
            traceback.print_exc()
            raise RunFailed(1) from None
        report_problem(str(failure).replace("hydra.run.dir=DIR", "hydra.sweep.dir=DIR"))
        raise RunFailed(failure.status) from None


@contextmanager
def threads_as_before() -> Iterator[None]:
    """Each run chooses among all threads, of which another one may have taken few."""
    import torch

    threads = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def train(job: "ComposedRun", signals: "Signals", direction: str | None = None) -> float | None:
    """Run a job in this process; returns the number of its results that `optimize` names, None where it names none.

    Args:
        signals: gets the setting for SIGUSR1 of this run.
        direction: in which a search wants that number.
    """
    from distill.config.settings import OnUsr1
    from distill.job import run_job
    from distill.report.comparison.goal import Goal

    signals.on_usr1(job.config.train.on_usr1 is OnUsr1.stop)
    goal = Goal.of(job.config.optimize, direction)
    # With its direction, which the run checks before it trains.
    results = run_job(*job._replace(config=job.config.changed(optimize=goal)))
    if goal is None:
        return None
    value = goal.value(results)
    shown = "no number" if value is None else f"{value:.6g}"
    logging.getLogger("distill").info(f"optimize: {goal.name} = {shown}")
    return value


def start_ranks(job: "ComposedRun", names_folder: bool = False) -> int | None:
    """Run this command as every rank, and give its exit status; None in a process that is to run the job itself.

    `names_folder`: whether the command names the run folder for the ranks, each of which would find another one.
    """
    from distill.config.command_line import run_dir
    from distill.distributed import launch
    from distill.runs.check import check

    backend = job.config.backend
    if backend.name == "single":
        return None
    check(job.config, job.folder)
    if launch.should_launch(backend):
        command = [sys.executable, *sys.orig_argv[1:]]
        if names_folder:
            command.append(run_dir(job.folder))
        return launch.launch(backend, command)
    launch.keep_log(job.folder)
    return None
