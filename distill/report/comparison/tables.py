"""A comparison as tables, sentences and a figure: scores and costs of each group of runs, what differs, every run."""

import math
from collections.abc import Callable, Sequence
from itertools import groupby
from textwrap import shorten
from typing import TYPE_CHECKING, Any

from distill.report import gap
from distill.report.comparison.columns import GAP_CLOSED, SPEED, Column
from distill.report.comparison.compare import UNEVEN, Comparison, Group, shown
from distill.report.figures import MODELS, Drawn, dots, sheet
from distill.report.page import Table, Tiles
from distill.report.words import NONE, count_of, is_number, percent
from distill.runs.facts import Model
from distill.runs.record import Record
from distill.runtime.progress import counted

if TYPE_CHECKING:
    import pandas as pd

MAX_SETTINGS = 5  # that are columns of the tables; more have a table of their own
MAX_BEST = 8  # sentences on the best groups
# The 97.5 % quantiles of Student's distribution, for 1 to 10 degrees of freedom.
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
MAX_TILES, MAX_LABEL = 4, 60  # numbers to see first, and letters of the settings beside each
MAX_PANELS, MAX_ROWS = 3, 24  # of the figure
APART = "†"


def summary(comparison: Comparison) -> str:
    """How many runs there are, and how many groups they make."""
    finished, runs, groups = len(comparison.records), len(comparison.runs), comparison.groups
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
        line = f"{column.title}: best is {column.form(values.mean())} with {group.label}"
        line += f" (mean of {len(values)} {group.repeats})" if len(values) > 1 else ""
        line += f"; next {column.form(others.mean())} with {second.label}"
        overlap = max(values.min(), others.min()) <= min(values.max(), others.max())
        line += ", and the ranges of their seeds overlap" if min(len(values), len(others)) > 1 and overlap else ""
        lines.append(f"{line}{_difference(column, values, others)}.")
    return lines


def _difference(column: Column, one: "pd.Series", two: "pd.Series") -> str:
    """The mean difference of two groups over the seeds that both have, with its 95 % interval (paired t-test)."""
    differences = (two.groupby(level=0).last() - one.groupby(level=0).last()).dropna()
    if len(differences) < 2:
        return ""
    degrees, mean = len(differences) - 1, differences.mean()
    quantile = STUDENT[degrees - 1] if degrees <= len(STUDENT) else 1.96 + 2.6 / degrees
    half = quantile * differences.std() / math.sqrt(len(differences))
    low, high = (column.form(mean + sign * half) for sign in (-1, 1))
    seeds = f"{len(differences)} seeds of both"
    return f"; over {seeds} the difference is {column.form(mean)} (95 % interval {low} to {high})"


def best_tiles(comparison: Comparison) -> Tiles:
    """The best number of each measure on its first set."""
    tiles = []
    for column in {column.group: column for column in reversed(comparison.columns)}.values():
        for group, values in comparison.best(column)[:1]:
            label = shorten(group.label, MAX_LABEL, placeholder=" …")
            tiles.append((column.form(values.mean()), f"{column.title}: the best, with {label}"))
    return Tiles(tiles[::-1][:MAX_TILES])


def scores_table(comparison: Comparison) -> Table:
    """A line for each group, then the teacher's and the baseline's scores where they are the same for all."""
    references: dict[str, Callable[[Record], Model | None]] = {
        "teacher": lambda record: record.teacher,
        "baseline without a teacher": lambda record: record.baseline,
    }
    columns = comparison.columns
    cells = {title: [_reference(comparison, column, of) for column in columns] for title, of in references.items()}
    notes = []
    if any(len(group.finished) > 1 for group in comparison.groups):
        notes.append("With several seeds: the mean (lowest to highest).")
    if any(column.measure == GAP_CLOSED for column in columns):
        notes.append("Of one run the gap closed has the 95 % interval of its bootstrap, where there is one.")
    if comparison.reasons:
        notes.append(
            f"Numbers with the mark {APART} cannot be compared with the others. What is not the same: "
            f"{', '.join(comparison.reasons)}."
        )
    directions = {column.group: column.lower_is_better for column in columns}
    for lower in (True, False):
        if titles := [group for group, is_lower in directions.items() if is_lower is lower]:
            notes.append(f"{'Lower' if lower else 'Higher'} is better: {', '.join(titles)}.")
    table = _table(comparison, columns, " ".join(notes))
    between = [""] * (len(table.head) - len(columns) - 1)
    table.rows.extend([title, *between, *of_model] for title, of_model in cells.items() if {*of_model} - {NONE})
    return table


def _reference(comparison: Comparison, column: Column, model_of: Callable[[Record], Model | None]) -> str:
    """The score of a model that is not the student, where it is the same in every run whose numbers can be compared."""
    apart = comparison.apart.get(column.name, set())
    models = [model_of(run.record) for run in comparison.runs if run.record is not None and run.folder not in apart]
    values = {None if model is None else model.score(column.measure, column.data) for model in models}
    texts = {column.form(value) for value in values if value is not None}
    return texts.pop() if len(texts) == 1 and None not in values else NONE


def costs_table(comparison: Comparison) -> Table:
    """Size, speed and time of each group."""
    environments = [record.environment for record in comparison.records]
    parts = ((str(of_run.device), count_of(of_run.cpu_count, "core")) for of_run in environments)
    devices = {", ".join(filter(None, part)) for part in parts}
    notes = []
    if len(devices) > 1:
        notes.append(f"Speeds and times come from different devices ({'; '.join(sorted(devices))}).")
    if comparison.uneven:
        notes.append(
            f"* Speeds of one model that differ by more than {percent(UNEVEN - 1)}: the machine had other work in some "
            "of these runs. The report of a run compares student and teacher, which took turns."
        )
    return _table(comparison, comparison.costs, " ".join(notes))


def settings_table(comparison: Comparison) -> Table:
    """The settings that differ, one a line, where they are too many for columns; else a table without rows."""
    names, groups = comparison.names, comparison.groups
    rows = [[name, *(shown(group.values[name]) for group in groups)] for name in names]
    return Table(["", *(group.runs[0].name for group in groups)], rows if len(names) > MAX_SETTINGS else [], text=True)


def runs_table(comparison: Comparison) -> Table:
    """Every run with its seed and its status."""
    rows = [[run.name, shown(run.seed) if run.settings else NONE, run.status] for run in comparison.runs]
    return Table(["Run", "Seed", "Status"], rows, text=True)


def _table(comparison: Comparison, columns: Sequence[Column], note: str) -> Table:
    names = comparison.names if len(comparison.names) <= MAX_SETTINGS else []
    head = [*(names or ["Run"]), "Runs", *(column.label or column.group for column in columns)]
    groups: list[tuple[str, int]] = []
    if any(column.label for column in columns):
        groups = [("", len(head) - len(columns))]
        groups += [(name, len(list(members))) for name, members in groupby(columns, key=lambda column: column.group)]
    rows = []
    for group in comparison.groups:
        first = [shown(group.values[name]) for name in names] or [group.runs[0].name]
        rows.append([*first, _seeds(group), *(_cell(comparison, group, column) for column in columns)])
    return Table(head, rows, note, groups=groups)


def _seeds(group: Group) -> str:
    """The seeds of the finished runs by name, as a bare 0 reads as a number of runs, and how many more there are."""
    seeds = ", ".join(shown(run.seed) for run in group.finished)
    missing = len(group.runs) - len(group.finished)
    parts = [f"seed{'s' * (len(group.finished) > 1)} {seeds}"] if seeds else []
    return ", ".join([*parts, *([f"{missing} not finished"] if missing else [])])


def _cell(comparison: Comparison, group: Group, column: Column) -> str:
    """The mean with the range; the numbers that cannot be compared by themselves, with their mark."""
    mark = " *" if column == SPEED and any(run.folder in comparison.uneven for run in group.runs) else ""
    both = {mark: comparison.values(group, column), f" {APART}": comparison.values(group, column, apart=True)}
    text = "; ".join(f"{mean_and_range(of, column.form)}{mark}" for mark, of in both.items() if len(of)) or NONE
    records = [run.record for run in group.finished if run.record is not None]
    if column.measure != GAP_CLOSED or len(records) != 1:
        return text
    # Of one run there is no range, but the bootstrap of its student and its baseline.
    closed = gap.closed_of(records[0], records[0].first_measure[0], column.data)
    has_interval = closed is not None and is_number(closed.low) and is_number(closed.high)
    return f"{text} ({column.form(closed.low)} to {column.form(closed.high)})" if closed and has_interval else text


def mean_and_range(values: "pd.Series", form: Callable[[Any], str]) -> str:
    """`44.1 (43.9 to 44.3)`; one number alone where there is one, or where they show as the same."""
    mean, low, high = (form(value) for value in (values.mean(), values.min(), values.max()))
    return mean if low == high else f"{mean} ({low} to {high})"


def figure(comparison: Comparison) -> Drawn | None:
    """A panel for each score with a row for each group, of many the best by the first score, in the tables' order.

    None where fewer than two groups have numbers that can be compared.
    """
    columns = [column for column in comparison.columns if len(comparison.best(column)) > 1][:MAX_PANELS]
    if not columns:
        return None
    best = [group for group, _ in comparison.best(columns[0])][:MAX_ROWS]
    groups = [group for group in comparison.groups if group in best]
    rows = [shorten(group.label, MAX_LABEL, placeholder=" …") for group in groups]
    columns = [column for column in columns if any(len(comparison.values(group, column)) for group in groups)]
    titles = [_panel_title(column) for column in columns]
    made = sheet(titles, "", len(columns), 0.9 + 0.22 * len(rows), max(map(len, rows)))
    for area, column in zip(made.areas, columns, strict=True):
        of_rows = {row: comparison.values(group, column) for row, group in enumerate(groups)}
        by_row = {row: values for row, values in of_rows.items() if len(values)}
        means = {row: values.mean() for row, values in by_row.items()}
        spans = {row: (values.min(), values.max(), MODELS["student"], 1.5) for row, values in by_row.items()}
        dots(area, rows, {"": (MODELS["student"], "o", means)}, spans)
    several = any(len(group.finished) > 1 for group in groups)
    caption = "Scores" + (": the mean of the seeds, and lines from the lowest to the highest" if several else "")
    return made.figure, caption + (", without the numbers that cannot be compared." if comparison.reasons else ".")


def _panel_title(column: Column) -> str:
    better = "lower" if column.lower_is_better else "higher"
    group, label = (shorten(text, 80, placeholder=" …") for text in (column.group, column.label))
    return f"{group}\n{label} ({better} is better)".strip()
