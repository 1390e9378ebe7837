"""Writes a comparison: compare.html, compare.md and compare.csv, and the same tables as a text to print."""

import csv
from pathlib import Path
from typing import Any

from distill.report import page
from distill.report.comparison.columns import columns_of
from distill.report.comparison.comparison import Comparison, compare
from distill.report.comparison.figures import NAME, draw
from distill.report.comparison.runs import Run
from distill.report.comparison.tables import (
    best_lines,
    best_tiles,
    costs_table,
    runs_table,
    scores_table,
    settings_table,
    summary,
)
from distill.report.page import Renewal, Section, Table
from distill.runtime.errors import printable
from distill.runtime.files import atomic, make_folder, refuse_overwriting

FORMULA = ("=", "+", "-", "@", "\t", "\r")  # a cell that begins so is one to a spreadsheet
HTML, MARKDOWN, TABLE = "compare.html", "compare.md", "compare.csv"


def write(folder: Path, runs: list[Run], title: str, first: str | None = None, renew: int | None = None) -> Comparison:
    """Write compare.html, compare.md, compare.csv and plots/ for these runs into `folder`.

    Args:
        first: name of the number that comes first and orders the lines, best first.
        renew: seconds after which a browser loads the page again, while runs are under way.

    Raises:
        SettingError: no number has the name `first`.
    """
    make_folder(folder, f"output={folder}")
    comparison = compare(runs, first)
    sections = sections_of(comparison, folder)
    # The page changes only when a run ends, so it shows no notice of missing news.
    html = page.html(title, sections, None if renew is None else Renewal(renew, watched=False))
    for name, text in ((HTML, html), (MARKDOWN, page.markdown(title, sections))):
        with atomic(folder / name) as new:
            new.write_text(text, encoding="utf-8")
    _write_csv(folder / TABLE, comparison)
    return comparison


def check_output(folder: Path, overwrite: bool) -> None:
    """Raises SettingError where the files of a comparison would replace those of another program."""
    for name in (HTML, MARKDOWN, TABLE, f"plots/{NAME}.png"):
        is_written_here = page.is_written_here(folder / HTML)
        refuse_overwriting(folder / name, f"output={folder}", overwrite=overwrite or is_written_here)


def sections_of(comparison: Comparison, folder: Path) -> list[Section]:
    """The page; its figures are drawn into `folder`/plots."""
    scores = [table for table in (scores_table(comparison),) if comparison.columns]
    costs = [table for table in (costs_table(comparison),) if comparison.costs]
    sections = [
        Section("", [summary(comparison), *([tiles] if (tiles := best_tiles(comparison)).tiles else [])]),
        Section("Scores", [*scores, *draw(folder, comparison), *filter(None, [best_lines(comparison)])]),
        Section("Size, speed and time", [*costs]),
        Section("Settings that differ", [table for table in (settings_table(comparison),) if table.rows]),
        Section("Runs", [runs_table(comparison)]),
    ]
    return [section for section in sections if section.blocks]


def text_of(comparison: Comparison) -> str:
    """The table of scores, and the runs that are not finished, for a terminal, to which names send no commands."""
    parts = [summary(comparison)]
    if comparison.columns:
        table = scores_table(comparison)
        parts += [aligned(table), table.note]
    parts += [f"{run.name}: {run.status}" for run in comparison.runs if run.record is None]
    return "\n".join(printable(line) for part in parts if part for line in part.split("\n"))


def aligned(table: Table) -> str:
    """A table in columns of spaces, for a terminal."""
    widths = [max(len(line[at]) for line in [table.head, *table.rows]) for at in range(len(table.head))]
    at = 0
    for group, span in table.groups:  # a heading has the width of all its columns
        widths[at] += max(0, len(group) - sum(widths[at : at + span]) - 2 * (span - 1))
        at += span
    headings = [_headings(table.groups, widths)] if table.groups else []
    return "\n".join([*headings, *(_line(line, widths) for line in [table.head, *table.rows])])


def _headings(groups: list[tuple[str, int]], widths: list[int]) -> str:
    headings, at = [], 0
    for group, span in groups:
        headings.append(group.rjust(sum(widths[at : at + span]) + 2 * (span - 1)))
        at += span
    return "  ".join(headings).rstrip()


def _line(cells: list[str], widths: list[int]) -> str:
    first, *others = (
        cell.ljust(width) if at == 0 else cell.rjust(width)
        for at, (cell, width) in enumerate(zip(cells, widths, strict=True))
    )
    return "  ".join([first, *others]).rstrip()


def header_of(comparison: Comparison) -> list[str]:
    """The names of what `records_of` gives."""
    numbers = dict.fromkeys(
        column.name for run in comparison.finished if run.record for column in columns_of(run.record)
    )
    return ["run", "status", "seed", *comparison.names, *numbers]


def records_of(comparison: Comparison) -> list[list[Any]]:
    """For each run its folder, status and seed, the settings that differ, and every number; None for what it lacks."""
    names = comparison.names
    settings = {str(run.folder): group.values for group in comparison.groups for run in group.runs}
    numbers = header_of(comparison)[3 + len(names) :]
    records = []
    for run in comparison.runs:
        values, record = settings.get(str(run.folder), {}), run.record
        numbers_of_run = {column.name: column.value(record) for column in columns_of(record)} if record else {}
        about = [run.name, run.status, run.seed, *(values.get(name) for name in names)]
        records.append([*about, *(numbers_of_run.get(name) for name in numbers)])
    return records


def _write_csv(path: Path, comparison: Comparison) -> None:
    with atomic(path) as new, new.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerows([_cell(value) for value in line] for line in (header_of(comparison), *records_of(comparison)))


def _cell(value: Any) -> Any:
    """A cell of a CSV file: a text that a spreadsheet would compute as a formula begins with an apostrophe."""
    if isinstance(value, str) and value.startswith(FORMULA):
        return f"'{value}"
    return "" if value is None else value
