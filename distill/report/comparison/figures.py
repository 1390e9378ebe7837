"""What the figures of a comparison show: scores against settings that differ, or by rank where these make no axis."""

from itertools import cycle
from pathlib import Path
from statistics import fmean
from textwrap import shorten

from distill.report.comparison.columns import Column
from distill.report.comparison.comparison import Comparison
from distill.report.comparison.groups import Group, shown
from distill.report.figures import MODELS, SERIES, DotPanel, Line, Panel, Sheet, picture
from distill.report.page import Picture
from distill.report.words import is_number

MAX_SERIES = 6  # lines in a panel
MAX_PANELS = 9
MAX_RANKED = 24  # groups in a figure by rank
FEWEST_DRAWN = 6  # groups of a search
NAME = "compare"


def draw(folder: Path, comparison: Comparison) -> list[Picture]:
    """Draw into `folder`/plots what there are numbers for; nothing where fewer than two groups have any."""
    columns = [column for column in comparison.columns if len(comparison.best(column)) > 1][:MAX_PANELS]
    if not columns:
        return []
    if (axis := axis_of(comparison)) is not None:
        panels = _by_setting(comparison, columns, axis)
        caption = f"Scores by {axis}{_spread(comparison)}."
        return [picture(folder, NAME, Sheet(panels, caption, min(3, len(panels)), 2.4, "below"))]
    if scattered := scattered_settings(comparison):
        panels = _scattered(comparison, columns[0], scattered[:MAX_PANELS])
        caption = f"{columns[0].title} of each run by the settings that differ; the diamond is the best."
        return [picture(folder, NAME, Sheet(panels, caption, min(3, len(panels)), 2.2))]
    ranked = _ranked(comparison, columns[:3])
    caption = f"Scores, best {columns[0].title} first{_spread(comparison)}."
    return [picture(folder, NAME, Sheet(ranked, caption, len(ranked), 0.9 + 0.22 * len(ranked[0].rows)))]


def axis_of(comparison: Comparison) -> str | None:
    """The setting for the horizontal axis: numbers, as many as possible, with few lines for the other settings."""
    groups = comparison.groups
    numeric = _numeric(comparison)
    fitting = []
    for name in numeric:
        series = {_series(group, name) for group in groups}
        values = {group.values[name] for group in groups}
        if len(series) <= MAX_SERIES and len(values) * len(series) <= 2 * len(groups):
            fitting.append((len(values), name))
    return max(fitting, key=lambda pair: pair[0])[1] if fitting else None


def scattered_settings(comparison: Comparison) -> list[str]:
    """The settings whose values a search has drawn: numbers that hardly come twice; none of a few runs."""
    groups = comparison.groups
    if len(groups) < FEWEST_DRAWN:
        return []
    return [name for name in _numeric(comparison) if len({group.values[name] for group in groups}) > len(groups) / 2]


def _numeric(comparison: Comparison) -> list[str]:
    groups = comparison.groups
    return [
        name
        for name in comparison.names
        if all(is_number(group.values[name]) for group in groups) and len({group.values[name] for group in groups}) > 1
    ]


def _series(group: Group, axis: str) -> str:
    """What a line stands for: the settings besides that of the axis, by their own names where these are enough."""
    others = {name: value for name, value in group.values.items() if name != axis}
    short = {name: ".".join(name.split(".")[-2:]) for name in others}
    return ", ".join(f"{short[name]}={shown(value)}" for name, value in others.items())


def _by_setting(comparison: Comparison, columns: list[Column], axis: str) -> list[Panel]:
    """A panel for each score, with a line for each combination of the other settings."""
    names = list(dict.fromkeys(_series(group, axis) for group in comparison.groups))
    colours = dict(zip(names, cycle(SERIES), strict=False))
    panels = []
    for column in columns:
        lines = []
        for name in names:
            points = [
                (group.values[axis], values)
                for group in comparison.groups
                if _series(group, axis) == name and (values := comparison.values(group, column))
            ]
            points.sort(key=lambda point: point[0])
            spread = [(min(values), max(values)) for _, values in points]
            x, y = [at for at, _ in points], [fmean(values) for _, values in points]
            label = name if len(names) > 1 else ""
            lines += [Line(x, y, colours[name], label, marker="o", spread=spread)] if x else []
        panels.append(Panel(_title(column), axis, lines, settings=_texts(comparison.groups, axis)))
    return panels


def _scattered(comparison: Comparison, column: Column, names: list[str]) -> list[Panel]:
    """A panel for each setting that a search has drawn, with a dot for each run and a diamond for the best."""
    ranked = comparison.best(column)
    y = [fmean(values) for _, values in ranked]
    panels = []
    for number, name in enumerate(names):
        x = [group.values[name] for group, _ in ranked]
        lines = [
            Line(x[1:], y[1:], MODELS["student"], marker="o", joined=False),
            Line(x[:1], y[:1], MODELS["baseline"], marker="D", joined=False),
        ]
        texts = _texts([group for group, _ in ranked], name)
        panels.append(Panel("" if number else _title(column), name, lines, settings=texts))
    return panels


def _texts(groups: list[Group], setting: str) -> dict[float, str]:
    return {group.values[setting]: shown(group.values[setting]) for group in groups}


def _ranked(comparison: Comparison, columns: list[Column]) -> list[DotPanel]:
    """A panel for each score, with a row for each group, best first."""
    order = [group for group, _ in comparison.best(columns[0])][:MAX_RANKED]
    rows = [shorten(group.label, 60, placeholder=" …") for group in order]
    panels = []
    for column in columns:
        values = {row: comparison.values(group, column) for row, group in enumerate(order)}
        if not any(values.values()):  # only groups that the first score does not rank have this one
            continue
        means = {row: fmean(numbers) for row, numbers in values.items() if numbers}
        spans = {row: (min(numbers), max(numbers)) for row, numbers in values.items() if numbers}
        panels.append(DotPanel(_title(column), rows, {"": (MODELS["student"], "o", means)}, spans))
    return panels


def _spread(comparison: Comparison) -> str:
    several = any(len(group.finished) > 1 for group in comparison.groups)
    marked = ", without the numbers that cannot be compared" if comparison.reasons else ""
    return (": the mean of the seeds, and lines from the lowest to the highest" if several else "") + marked


def _title(column: Column) -> str:
    better = "lower" if column.lower_is_better else "higher"
    group, label = (shorten(text, 80, placeholder=" …") for text in (column.group, column.label))
    return f"{group}\n{label} ({better} is better)".strip()
