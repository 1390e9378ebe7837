"""A comparison as tables and sentences: scores and costs of each group of runs, what differs, and every run."""

from collections.abc import Callable
from dataclasses import replace
from itertools import groupby
from statistics import fmean
from textwrap import shorten
from typing import Any

from distill.report.comparison.columns import Column
from distill.report.comparison.comparison import Comparison
from distill.report.comparison.groups import Group, shown
from distill.report.page import Table, Tiles
from distill.report.words import NONE, count_of
from distill.runs.facts import Model
from distill.runs.record import Record
from distill.runtime.progress import counted

MAX_SETTINGS = 5  # that are columns of the tables; more have a table of their own
MAX_BEST = 8  # sentences on the best groups
MAX_TILES, MAX_LABEL = 4, 60  # numbers to see first, and letters of the settings beside each


def summary(comparison: Comparison) -> str:
    """How many runs there are, and how many groups they make."""
    finished, runs, groups = len(comparison.finished), len(comparison.runs), comparison.groups
    sentences = ["1 run." if runs == 1 else f"{runs} runs, {finished} of them finished."]
    if groups:
        several = sum(len({run.seed for run in group.runs}) > 1 for group in groups)
        text = f"{counted(len(groups), 'combination')} of settings"
        sentences.append(text + (f", {several} of them with several seeds." if several else "."))
    if names := comparison.names:
        more = f" and {len(names) - MAX_SETTINGS} more" if len(names) > MAX_SETTINGS else ""
        sentences.append(f"What differs: {', '.join(names[:MAX_SETTINGS])}{more}.")
    return " ".join(sentences)


def best_lines(comparison: Comparison) -> list[str]:
    """For each score the best group, and whether the ranges of the seeds overlap."""
    lines = []
    for column in comparison.columns[:MAX_BEST]:
        ranked = comparison.best(column)
        if len(ranked) < 2:
            continue
        (group, values), (second, others) = ranked[:2]
        line = f"{column.title}: best is {column.form(fmean(values))} with {group.label}"
        line += f" (mean of {len(values)} {group.repeats})" if len(values) > 1 else ""
        line += f"; next {column.form(fmean(others))} with {second.label}"
        if len(values) > 1 and len(others) > 1 and max(min(values), min(others)) <= min(max(values), max(others)):
            line += ", and the ranges of their seeds overlap"
        lines.append(f"{line}.")
    return lines


def best_tiles(comparison: Comparison) -> Tiles:
    """The best number of each measure on its first set."""
    firsts = {column.group: column for column in reversed(comparison.columns)}
    tiles = []
    for column in dict.fromkeys(firsts[column.group] for column in comparison.columns):
        for group, values in comparison.best(column)[:1]:
            label = shorten(group.label, MAX_LABEL, placeholder=" …")
            tiles.append((column.form(fmean(values)), f"{column.title}: the best, with {label}"))
    return Tiles(tiles[:MAX_TILES])


def scores_table(comparison: Comparison) -> Table:
    """A line for each group, then the teacher's and the baseline's scores where they are the same for all."""
    table = _table(comparison, comparison.columns)
    width = len(table.head) - len(comparison.columns)
    references: dict[str, Callable[[Record], Model | None]] = {
        "teacher": lambda record: record.teacher,
        "baseline without a teacher": lambda record: record.baseline,
    }
    for title, model_of in references.items():
        cells = [_reference(comparison, column, model_of) for column in comparison.columns]
        if set(cells) - {NONE}:
            table.rows.append([title, *[""] * (width - 1), *cells])
    notes = []
    if any(len(group.finished) > 1 for group in comparison.groups):
        notes.append("With several seeds: the mean (lowest to highest).")
    if comparison.reasons:
        notes.append(
            "Numbers with different marks (†, ‡, §, ¶, none) cannot be compared. What is not the same: "
            f"{', '.join(comparison.reasons)}."
        )
    directions = {column.group: column.lower_is_better for column in comparison.columns}
    for lower in (True, False):
        if titles := [group for group, is_lower in directions.items() if is_lower is lower]:
            notes.append(f"{'Lower' if lower else 'Higher'} is better: {', '.join(titles)}.")
    return replace(table, note=" ".join(notes))


def costs_table(comparison: Comparison) -> Table:
    """Size, speed and time of each group."""
    table = _table(comparison, comparison.costs)
    environments = [run.record.environment for run in comparison.finished if run.record]
    parts = ((str(of_run.device), count_of(of_run.cpu_count, "core")) for of_run in environments)
    devices = {", ".join(filter(None, part)) for part in parts}
    if len(devices) > 1:
        return replace(table, note=f"Speeds and times come from different devices ({'; '.join(sorted(devices))}).")
    return table


def settings_table(comparison: Comparison) -> Table:
    """The settings that differ, one a line, where they are too many for columns; else a table without rows."""
    names, groups = comparison.names, comparison.groups
    if len(names) <= MAX_SETTINGS:
        return Table([])
    head = ["", *(group.runs[0].name for group in groups)]
    rows = [[name, *(shown(group.values[name]) for group in groups)] for name in names]
    return Table(head, rows, text=True)


def runs_table(comparison: Comparison) -> Table:
    """Every run with its seed and its status."""
    rows = [[run.name, shown(run.seed) if run.settings else NONE, run.status] for run in comparison.runs]
    return Table(["Run", "Seed", "Status"], rows, text=True)


def _table(comparison: Comparison, columns: list[Column]) -> Table:
    names = comparison.names
    of_settings = names if 0 < len(names) <= MAX_SETTINGS else []
    head = [*(of_settings or ["Run"]), "Seeds", *(column.label or column.group for column in columns)]
    groups: list[tuple[str, int]] = []
    if any(column.label for column in columns):
        groups = [("", len(head) - len(columns))]
        groups += [(name, len(list(members))) for name, members in groupby(columns, key=lambda column: column.group)]
    rows = []
    for group in comparison.groups:
        first = [shown(group.values[name]) for name in of_settings] or [group.runs[0].name]
        rows.append([*first, _seeds(group), *(_cell(comparison, group, column) for column in columns)])
    return Table(head, rows, groups=groups)


def _seeds(group: Group) -> str:
    """The seeds of the finished runs, and how many more there are."""
    seeds = ", ".join(shown(run.seed) for run in group.finished)
    missing = len(group.runs) - len(group.finished)
    return f"{seeds or NONE} ({missing} not finished)" if missing else seeds


def _cell(comparison: Comparison, group: Group, column: Column) -> str:
    """The mean with the range, and the mark; of numbers with several marks each of these apart."""
    by_mark = {mark: comparison.values(group, column, mark) for mark in comparison.marks_of(group, column)}
    shown = (
        f"{mean_and_range(values, column.form)}{mark and f' {mark}'}" for mark, values in by_mark.items() if values
    )
    return "; ".join(shown) or NONE


def mean_and_range(values: list[float], form: Callable[[Any], str]) -> str:
    """`44.1 (43.9 to 44.3)`; one number alone where there is one, or where they show as the same."""
    mean, low, high = form(_like(values, fmean(values))), form(min(values)), form(max(values))
    return mean if len(values) == 1 or low == high else f"{mean} ({low} to {high})"


def _like(values: list[float], mean: float) -> float:
    """A mean of counts that are all the same is that count."""
    return values[0] if all(value == values[0] for value in values) else mean


def _reference(comparison: Comparison, column: Column, model_of: Callable[[Record], Model | None]) -> str:
    """The score of a model that is not the student, where it is the same in every run whose numbers can be compared."""
    marks = comparison.marks.get(column.name, {})
    values = [
        column.of_model(model_of(run.record))
        for run in comparison.finished
        if run.record is not None and not marks.get(str(run.folder), "")
    ]
    texts = {column.form(value) for value in values if value is not None}
    return texts.pop() if len(texts) == 1 and None not in values else NONE
