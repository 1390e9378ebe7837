"""A comparison as tables and sentences: scores and costs of each group of runs, what differs, and every run."""

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import groupby
from statistics import fmean, stdev
from textwrap import shorten
from typing import Any

from distill.report import gap
from distill.report.comparison.columns import GAP_CLOSED, Column
from distill.report.comparison.comparison import SPEED, UNEVEN, UNEVEN_MARK, Comparison
from distill.report.comparison.groups import Group, shown
from distill.report.page import Table, Tiles
from distill.report.words import NONE, count_of, is_number, percent
from distill.runs.facts import Model
from distill.runs.record import Record
from distill.runtime.progress import counted

MAX_SETTINGS = 5  # that are columns of the tables; more have a table of their own
MAX_BEST = 8  # sentences on the best groups
# The 97.5 % quantiles of Student's distribution, for 1 to 10 degrees of freedom.
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
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
        lines.append(f"{line}{_difference(comparison, column, group, second)}.")
    return lines


def _difference(comparison: Comparison, column: Column, group: Group, other: Group) -> str:
    """The mean difference of two groups over the seeds that both have, with its 95 % interval (paired t-test)."""
    one, two = (comparison.by_seed(part, column) for part in (group, other))
    differences = [two[seed] - one[seed] for seed in one.keys() & two.keys()]
    if len(differences) < 2:
        return ""
    degrees, mean = len(differences) - 1, fmean(differences)
    quantile = STUDENT[degrees - 1] if degrees <= len(STUDENT) else 1.96 + 2.6 / degrees
    half = quantile * stdev(differences) / math.sqrt(len(differences))
    low, high = (column.form(mean + sign * half) for sign in (-1, 1))
    seeds = f"{len(differences)} seeds of both"
    return f"; over {seeds} the difference is {column.form(mean)} (95 % interval {low} to {high})"


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
    if any(column.measure == GAP_CLOSED for column in comparison.columns):
        notes.append("Of one run the gap closed has the 95 % interval of its bootstrap, where there is one.")
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
    notes = []
    if len(devices) > 1:
        notes.append(f"Speeds and times come from different devices ({'; '.join(sorted(devices))}).")
    if comparison.marks.get(SPEED.name):
        notes.append(
            f"{UNEVEN_MARK} Speeds of one model that differ by more than {percent(UNEVEN - 1)}: the machine had other "
            "work in some of these runs. The report of a run compares student and teacher, which took turns."
        )
    return replace(table, note=" ".join(notes))


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
    head = [*(of_settings or ["Run"]), "Runs", *(column.label or column.group for column in columns)]
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
    """The seeds of the finished runs by name, as a bare 0 reads as a number of runs, and how many more there are."""
    seeds = ", ".join(shown(run.seed) for run in group.finished)
    missing = len(group.runs) - len(group.finished)
    parts = [f"seed{'s' * (len(group.finished) > 1)} {seeds}"] if seeds else []
    return ", ".join([*parts, *([f"{missing} not finished"] if missing else [])])


def _cell(comparison: Comparison, group: Group, column: Column) -> str:
    """The mean with the range, and the mark; of numbers with several marks each of these apart."""
    by_mark = {mark: comparison.values(group, column, mark) for mark in comparison.marks_of(group, column)}
    shown = (
        f"{mean_and_range(values, column.form)}{mark and f' {mark}'}" for mark, values in by_mark.items() if values
    )
    text = "; ".join(shown) or NONE
    runs = [run.record for run in group.finished if run.record is not None]
    if column.measure != GAP_CLOSED or len(runs) != 1:
        return text
    # Of one run there is no range, but the bootstrap of its student and its baseline.
    closed = gap.closed_of(runs[0], runs[0].first_measure[0], column.data)
    has_interval = closed is not None and is_number(closed.low) and is_number(closed.high)
    return f"{text} ({column.form(closed.low)} to {column.form(closed.high)})" if closed and has_interval else text


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
