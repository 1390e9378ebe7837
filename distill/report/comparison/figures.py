"""The figure of a comparison: scores with the range of their seeds, a row for each group, in the tables' order."""

from pathlib import Path
from statistics import fmean
from textwrap import shorten

from distill.report import figures
from distill.report.comparison.columns import Column
from distill.report.comparison.comparison import Comparison
from distill.report.figures import MODELS, Drawn, dots, sheet
from distill.report.page import Picture

MAX_PANELS, MAX_ROWS = 3, 24
NAME = "compare"


def draw(folder: Path, comparison: Comparison) -> list[Picture]:
    """Draw into `folder`/plots what there are numbers for; nothing where fewer than two groups have any."""
    columns = [column for column in comparison.columns if len(comparison.best(column)) > 1][:MAX_PANELS]
    made = figures.picture(NAME, lambda: _scores(comparison, columns), folder) if columns else None
    return [made] if made else []


def _scores(comparison: Comparison, columns: list[Column]) -> Drawn:
    """A panel for each score; of many groups the best by the first one."""
    best = [group for group, _ in comparison.best(columns[0])][:MAX_ROWS]
    groups = [group for group in comparison.groups if group in best]
    rows = [shorten(group.label, 60, placeholder=" …") for group in groups]
    shown = [column for column in columns if any(comparison.values(group, column) for group in groups)]
    titles = [_title(column) for column in shown]
    made = sheet(titles, "", len(shown), 0.9 + 0.22 * len(rows), max(map(len, rows)))
    for area, column in zip(made.areas, shown, strict=True):
        by_row = {row: values for row, group in enumerate(groups) if (values := comparison.values(group, column))}
        means = {row: fmean(values) for row, values in by_row.items()}
        spans = {row: (min(values), max(values), MODELS["student"], 1.5) for row, values in by_row.items()}
        dots(area, rows, {"": (MODELS["student"], "o", means)}, spans)
    several = any(len(group.finished) > 1 for group in groups)
    caption = "Scores" + (": the mean of the seeds, and lines from the lowest to the highest" if several else "")
    caption += ", without the numbers that cannot be compared." if comparison.reasons else "."
    return made.figure, caption


def _title(column: Column) -> str:
    better = "lower" if column.lower_is_better else "higher"
    group, label = (shorten(text, 80, placeholder=" …") for text in (column.group, column.label))
    return f"{group}\n{label} ({better} is better)".strip()
