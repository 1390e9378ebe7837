"""A comparison for its reader: compare.html, compare.md and compare.csv, a text to print, an object for notebooks."""

from pathlib import Path
from typing import Any

from distill.report import figures, page
from distill.report.comparison import tables
from distill.report.comparison.compare import Comparison
from distill.report.comparison.runs import Run, find_runs
from distill.report.page import Block, Renewal, Section, render, table_text
from distill.runtime.errors import printable, raising_at_the_call
from distill.runtime.files import atomic, make_folder, refuse_overwriting

HTML, MARKDOWN, TABLE = "compare.html", "compare.md", "compare.csv"
NAME = "compare"  # of the figure


def write(folder: Path, comparison: Comparison, title: str, renew: int | None = None) -> None:
    """Write compare.html, compare.md, compare.csv and plots/ into `folder`.

    Args:
        renew: seconds after which a browser loads the page again, while runs are under way.
    """
    make_folder(folder, f"output={folder}")
    sections = sections_of(comparison, folder)
    # The page changes only when a run ends, so it shows no notice of missing news.
    html = page.html(title, sections, None if renew is None else Renewal(renew, watched=False))
    texts = {HTML: html, MARKDOWN: page.markdown(title, sections), TABLE: comparison.frame.to_csv(index=False)}
    for name, text in texts.items():
        with atomic(folder / name) as new:
            new.write_text(text, encoding="utf-8")


def sections_of(comparison: Comparison, folder: Path) -> list[Section]:
    """The page; its figure is drawn into `folder`/plots."""
    scores: list[Block] = [tables.scores_table(comparison)] if comparison.columns else []
    drawn = figures.picture(NAME, lambda: tables.figure(comparison), folder)
    best, tiles = tables.best_lines(comparison), tables.best_tiles(comparison)
    settings = tables.settings_table(comparison)
    sections = [
        Section("", [tables.summary(comparison), *([tiles] if tiles.tiles else [])]),
        Section("Scores", [*scores, *([drawn] if drawn else []), *([best] if best else [])]),
        Section("Size, speed and time", [tables.costs_table(comparison)] if comparison.costs else []),
        Section("Settings that differ", [settings] if settings.rows else []),
        Section("Runs", [tables.runs_table(comparison)]),
    ]
    return [section for section in sections if section.blocks]


def text_of(comparison: Comparison) -> str:
    """The table of scores, and the runs that are not finished, for a terminal, to which names send no commands."""
    parts = [tables.summary(comparison)]
    if comparison.columns:
        table = tables.scores_table(comparison)
        parts += [table_text(table), table.note]
    parts += [f"{run.name}: {run.status}" for run in comparison.runs if run.record is None]
    return "\n".join(printable(line) for part in parts if part for line in part.split("\n"))


class ComparedRuns:
    """Runs side by side, as a table of text (`print`), as records, or as the files of `distill compare`."""

    def __init__(self, runs: list[Run], by: str | None, setting: str = "by") -> None:
        """`setting`: what an error line calls `by`."""
        self.runs, self.by = runs, by
        self.comparison = Comparison(runs, by, setting)

    @property
    def records(self) -> list[dict[str, Any]]:
        """One dict for each run: `run`, `status`, `seed`, the settings that differ, and every number by its name."""
        return self.comparison.frame.to_dict("records")

    def write(self, folder: str | Path, title: str = "Comparison of runs", *, overwrite: bool = False) -> Path:
        """Write compare.html, compare.md, compare.csv and plots/ into `folder`; gives the first.

        Args:
            overwrite: whether they may replace files of these names that another program wrote.

        Raises:
            SettingError: such a file is in the way.
        """
        written_here = page.is_written_here(Path(folder) / HTML)
        for name in (HTML, MARKDOWN, TABLE, f"plots/{NAME}.png"):
            refuse_overwriting(Path(folder) / name, f"output={folder}", overwrite=overwrite or written_here)
        write(Path(folder), self.comparison, title)
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
