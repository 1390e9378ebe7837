"""A sweep: the progress of its runs, and the comparison at the end."""

import logging
import os
import sys
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from distill.commands.ending import expected, is_rank, report_problem
from distill.config.sweep.index import FAILED, FINISHED, RUNNING, SweepIndex
from distill.config.sweep.names import swept_overrides
from distill.runtime.errors import SettingError, first_line
from distill.runtime.host import storage_failure
from distill.runtime.progress import write_to
from distill.runtime.redaction import redact

ONE_PROCESS = "--multirun runs its jobs in one process: take backend=single, or start the runs one by one"
RENEW = 20  # seconds between two loads of the page while the sweep is under way

if TYPE_CHECKING:
    from distill.config.command_line import CommandLine
    from distill.config.composition import ComposedRun, Composition

    Train = Callable[[ComposedRun, str | None], float | None]

logger = logging.getLogger(__name__)


def run_sweep(line: "CommandLine", composition: "Composition", train: "Train") -> int:
    """Run a sweep or a search; returns the exit status of the first run that failed; the others still run.

    Args:
        train: runs a job and returns the number that a search optimizes, in the direction that the search has.
    """
    from distill.config.composition import by_hydra, check_sweep, fixed_overrides
    from distill.config.override_text import as_value

    if is_rank():
        raise SettingError(ONE_PROCESS)
    check_sweep(composition)
    sweep = Sweep(
        composition.sweep_folder,
        fixed_overrides(line, composition.hydra),
        composition.settings.get("optimize"),
    )
    statuses: list[int] = []
    try:
        folder = f"hydra.sweep.dir={as_value(str(composition.sweep_folder))}"
        by_hydra(replace(line, overrides=[*line.overrides, folder]), lambda run: _run(run, sweep, train, statuses))
    except Exception as error:  # also of Hydra itself and of a search
        if (failure := expected(error)) is None:
            raise
        report_problem(failure)
        statuses.append(failure.status)
    finally:
        if sweep.has_begun:
            write_to(sys.stdout, sweep.finish())
    return next(iter(statuses), 0)


def _run(run: "Composition", sweep: "Sweep", train: "Train", statuses: list[int]) -> float | None:
    """One run of a sweep. Its error is kept back from Hydra, which would print lines of its own and end all."""
    from distill.config.composition import run_of
    from distill.distributed.launch import should_launch

    sweep.begin(run.folder, run.overrides)
    try:
        job = run_of(run)
        if should_launch(job.config.backend):
            raise SettingError(ONE_PROCESS)
        with threads_as_before():
            value = train(job, run.hydra.sweeper.get("direction"))
    except Exception as error:
        failure = expected(error, str(run.folder))
        sweep.end(run.folder, run.overrides, failure or error)
        if failure is None:
            statuses.append(1)
            if run.hydra.sweeper.get("direction") is not None:  # a search takes it for a failed trial, and says no more
                traceback.print_exc()
            raise
        report_problem(sweep.line(failure))
        statuses.append(failure.status)
        return None
    sweep.end(run.folder, run.overrides)
    return value


@contextmanager
def threads_as_before() -> Iterator[None]:
    """Each run chooses among all threads, of which another one may have taken few."""
    import torch

    threads = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class Sweep:
    """Keeps sweep.yaml and the comparison of a sweep up to date, from the first run on."""

    def __init__(self, folder: Path, fixed: Collection[str], goal: str | None) -> None:
        """
        Args:
            fixed: names of the overrides that are the same in every run.
            goal: name of the number that `optimize` names.
        """
        self.folder, self.fixed, self.goal = folder, fixed, goal
        self.index = SweepIndex(folder)
        self.under_way: Path | None = None
        self.has_begun = False

    def begin(self, path: Path, overrides: Sequence[str]) -> None:
        """A run is about to begin in the folder `path`."""
        if not self.has_begun:
            self.index.forget_refused()
        self.under_way, self.has_begun = path.resolve(), True
        self._record(path, overrides, RUNNING)
        self._write(RENEW)

    def end(self, path: Path, overrides: Sequence[str], problem: object = None) -> None:
        """A run has ended, with a problem where one is given; the others still run."""
        self.under_way = None
        line = self.line(first_line(problem)) if isinstance(problem, BaseException) else ""
        self._record(path, overrides, FAILED if problem else FINISHED, redact(line))
        self._write(RENEW)

    def finish(self) -> str:
        """The table to print at the end, also where a signal has ended the sweep, and where the page is."""
        self.under_way = None
        return self._write(None)

    def line(self, problem: object) -> str:
        """A problem of a run in one line, with the setting that names the folder of a sweep."""
        return str(problem).replace("hydra.run.dir=DIR", "hydra.sweep.dir=DIR")

    def _record(self, path: Path, overrides: Sequence[str], status: str, problem: str = "") -> None:
        swept = [redact(override) for override in swept_overrides(overrides, self.fixed)]
        self.index.record(os.path.relpath(path, self.folder), swept, status, problem)

    def _write(self, renew: int | None) -> str:
        """Write the comparison so far; a failure ends no sweep, because `distill compare` can write it later."""
        from distill.report.comparison.runs import find_runs
        from distill.report.comparison.write import HTML, text_of, write

        try:
            title = f"Sweep {self.folder.name}" + (", so far" if renew else "")
            runs = [
                replace(run, status="running") if run.record is None and run.folder.resolve() == self.under_way else run
                for run in find_runs([str(self.folder)])
            ]
            comparison = write(self.folder, runs, title, self.goal, renew)
        except Exception as error:
            failure = storage_failure(error) or f"{type(error).__name__}: {first_line(error)}"
            if renew is None:
                logger.warning(f"No comparison ({failure}): `distill compare run={self.folder}` writes it.")
            return ""
        return f"{text_of(comparison)}\nComparison: {self.folder / HTML}\n"
