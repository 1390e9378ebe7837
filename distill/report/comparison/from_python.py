"""Comparisons from scripts and notebooks: `distill.compare("runs/first", "runs/second")` shows itself."""

from pathlib import Path
from typing import Any

from distill.report.comparison.comparison import compare as compared
from distill.report.comparison.runs import Run, find_runs
from distill.report.comparison.write import HTML, check_output, header_of, records_of, text_of, write
from distill.report.page import render
from distill.runtime.errors import raising_at_the_call


class ComparedRuns:
    """Runs side by side, as a table of text (`print`), as records, or as the files of `distill compare`."""

    def __init__(self, runs: list[Run], by: str | None, setting: str = "by") -> None:
        """`setting`: what an error line calls `by`."""
        self.runs, self.by = runs, by
        self.comparison = compared(runs, by, setting)

    @property
    def records(self) -> list[dict[str, Any]]:
        """One dict for each run: `run`, `status`, `seed`, the settings that differ, and every number by its name."""
        header = header_of(self.comparison)
        return [dict(zip(header, record, strict=True)) for record in records_of(self.comparison)]

    def write(self, folder: str | Path, title: str = "Comparison of runs", *, overwrite: bool = False) -> Path:
        """Write compare.html, compare.md, compare.csv and plots/ into `folder`; gives the first.

        Args:
            overwrite: whether they may replace files of these names that another program wrote.

        Raises:
            SettingError: such a file is in the way.
        """
        check_output(Path(folder), overwrite)
        write(Path(folder), self.runs, title, self.by)
        return Path(folder) / HTML

    def __str__(self) -> str:
        return text_of(self.comparison)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        return render("text.html", text=str(self))


@raising_at_the_call
def compare(*runs: str | Path, by: str | None = None) -> ComparedRuns:
    """Lay runs side by side: the settings in which they differ against their results.

    Args:
        runs: run folders, folders of runs, sweeps or chains, or globs.
        by: name of the number to begin with and to order by, such as `perplexity` or `heldout.perplexity`.

    Raises:
        SettingError: there are no such runs, or no number has that name.
    """
    return ComparedRuns(find_runs([str(run) for run in runs]), by)
