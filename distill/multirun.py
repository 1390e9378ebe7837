"""A sweep under way: how each of its runs is doing, and the comparison that it ends with."""

import logging
import os
from collections.abc import Collection, Sequence
from pathlib import Path

from distill.config.sweep.index import FAILED, FINISHED, RUNNING, SweepIndex
from distill.config.sweep.names import swept_overrides
from distill.runtime.errors import SettingError, first_line
from distill.runtime.redaction import redact, redact_override
from distill.runtime.storage import storage_failure

RENEW = 20  # seconds between two loads of the page while the sweep goes on
NO_TRIAL = "No trials are completed"  # what Optuna ends a search with where no run gave a number

logger = logging.getLogger(__name__)


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

    def begin(self, path: Path, overrides: Sequence[str]) -> None:
        """A run is about to begin in the folder `path`."""
        self.under_way = path.resolve()
        self._record(path, overrides, RUNNING)
        self._write(RENEW)

    def end(self, path: Path, overrides: Sequence[str], problem: object = None) -> None:
        """A run has ended, with a problem where one is given; the others go on."""
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
        swept = [redact_override(each) for each in swept_overrides(overrides, self.fixed)]
        self.index.record(os.path.relpath(path, self.folder), swept, status, problem)

    def _write(self, renew: int | None) -> str:
        """Write the comparison so far; what fails in it ends no sweep, as it can be written at any time."""
        from distill.report.comparison.runs import find_runs
        from distill.report.comparison.write import HTML, text_of, write

        try:
            title = f"Sweep {self.folder.name}" + (", so far" if renew else "")
            runs = find_runs([str(self.folder)])
            for run in runs:
                if run.record is None and run.folder.resolve() == self.under_way:
                    run.status = "running"
            comparison = write(self.folder, runs, title, self.goal, renew)
        except Exception as error:
            failure = storage_failure(error) or f"{type(error).__name__}: {first_line(error)}"
            if renew is None:
                logger.warning(f"No comparison ({failure}): `python -m distill.compare {self.folder}` writes it.")
            return ""
        return f"{text_of(comparison)}\nComparison: {self.folder / HTML}\n"


def search_failure(error: BaseException) -> SettingError | None:
    """The error of a search that no run gave a number to; None for any other."""
    if isinstance(error, ValueError) and str(error).startswith(NO_TRIAL):
        return SettingError("no run of the search has given a number to optimize: the lines above and its page say why")
    return None
