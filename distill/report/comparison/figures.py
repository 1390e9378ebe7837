"""The figures of a comparison: scores against the settings that differ, or, where that makes no axis, by rank."""

from itertools import cycle
from pathlib import Path
from statistics import fmean
from textwrap import shorten
from typing import Any

from distill.report.comparison.columns import Column
from distill.report.comparison.comparison import Comparison
from distill.report.comparison.groups import Group, is_number, shown
from distill.report.plots import INK, MODELS, SERIES, STYLE, Picture, make_panels, save_figure

MOST_SERIES = 6  # lines in a panel
MOST_PANELS = 9
MOST_RANKED = 24  # groups in a figure by rank
FEWEST_DRAWN = 6  # groups of a search
MOST_MARKS = 6  # on an axis
WIDE = 20.0  # an axis whose ends have a larger ratio is logarithmic
NAME = "compare"


def draw(folder: Path, comparison: Comparison) -> list[Picture]:
    """Draw into `folder`/plots what there are numbers for; nothing where fewer than two groups have any."""
    import matplotlib

    columns = [column for column in comparison.columns if len(comparison.best(column)) > 1][:MOST_PANELS]
    if not columns:
        return []
    axis = axis_of(comparison)
    scattered = scattered_settings(comparison)
    (folder / "plots").mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context(STYLE):
        if axis is not None:
            figure, caption = _by_setting(comparison, columns, axis)
        elif scattered:
            figure, caption = _scattered(comparison, columns[0], scattered)
        else:
            figure, caption = _ranked(comparison, columns[:3])
        return [Picture(f"plots/{NAME}.png", save_figure(figure, folder, NAME), caption)]


def axis_of(comparison: Comparison) -> str | None:
    """The setting for the horizontal axis: numbers, as many as possible, with few lines for the other settings."""
    groups = comparison.groups
    numeric = _numeric(comparison)
    found = []
    for name in numeric:
        series = {_series(group, name) for group in groups}
        values = {group.values[name] for group in groups}
        if len(series) <= MOST_SERIES and len(values) * len(series) <= 2 * len(groups):
            found.append((len(values), name))
    return max(found, key=lambda pair: pair[0])[1] if found else None


def scattered_settings(comparison: Comparison) -> list[str]:
    """The settings whose values a search has drawn: numbers that hardly come twice; none of a few runs."""
    groups = comparison.groups
    if len(groups) < FEWEST_DRAWN:
        return []
    return [name for name in _numeric(comparison) if len({group.values[name] for group in groups}) > len(groups) / 2]


def _numeric(comparison: Comparison) -> list[str]:
    groups = comparison.groups
    names = list(groups[0].values) if groups else []
    return [
        name
        for name in names
        if all(is_number(group.values[name]) for group in groups) and len({group.values[name] for group in groups}) > 1
    ]


def _series(group: Group, axis: str) -> str:
    """What a line stands for: the settings besides that of the axis, by their own names where these are enough."""
    others = {name: value for name, value in group.values.items() if name != axis}
    short = {name: ".".join(name.split(".")[-2:]) for name in others}
    return ", ".join(f"{short[name]}={shown(value)}" for name, value in others.items())


def _by_setting(comparison: Comparison, columns: list[Column], axis: str) -> tuple[Any, str]:
    names = list(dict.fromkeys(_series(group, axis) for group in comparison.groups))
    colours = dict(zip(names, cycle(SERIES), strict=False))
    across = min(3, len(columns))
    figure, panels = make_panels(len(columns), across, 2.4)
    for panel, column in zip(panels, columns, strict=True):
        for name in names:
            points = [
                (group.values[axis], values)
                for group in comparison.groups
                if _series(group, axis) == name and (values := comparison.values(group, column))
            ]
            points.sort(key=lambda point: point[0])
            x = [at for at, _ in points]
            panel.vlines(x, [min(v) for _, v in points], [max(v) for _, v in points], color=colours[name], linewidth=1)
            panel.plot(x, [fmean(v) for _, v in points], color=colours[name], marker="o", markersize=4, label=name)
        _title(panel, column)
        _stretch(panel, [group.values[axis] for group in comparison.groups])
    for panel in panels[-across:]:
        panel.set_xlabel(_plain(axis))
    if len(names) > 1:
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=min(3, len(names)))
    return figure, f"Scores by {axis}{_spread(comparison)}."


def _scattered(comparison: Comparison, column: Column, names: list[str]) -> tuple[Any, str]:
    names = names[:MOST_PANELS]
    across = min(3, len(names))
    ranked = comparison.best(column)
    figure, panels = make_panels(len(names), across, 2.2)
    for panel, name in zip(panels, names, strict=True):
        x, y = [group.values[name] for group, _ in ranked], [fmean(values) for _, values in ranked]
        panel.scatter(x[1:], y[1:], s=22, color=MODELS["student"])
        panel.scatter(x[:1], y[:1], s=46, color=MODELS["twin"], marker="D")
        panel.set_xlabel(_plain(name))
        _stretch(panel, x)
    _title(panels[0], column)
    return figure, f"{column.title} of each run by the settings that differ; the diamond is the best."


def _ranked(comparison: Comparison, columns: list[Column]) -> tuple[Any, str]:
    order = [group for group, _ in comparison.best(columns[0])][:MOST_RANKED]
    figure, panels = make_panels(len(columns), len(columns), 0.9 + 0.22 * len(order))
    for panel, column in zip(panels, columns, strict=True):
        for row, group in enumerate(order):
            if values := comparison.values(group, column):
                panel.hlines(row, min(values), max(values), color=MODELS["student"], linewidth=1.5)
                panel.scatter([fmean(values)], [row], s=26, color=MODELS["student"])
        _title(panel, column)
        panel.set_ylim(len(order) - 0.5, -0.5)
        panel.set_yticks(range(len(order)), [_plain(shorten(group.label, 60, placeholder=" …")) for group in order])
        panel.tick_params(axis="y", labelleft=panel is panels[0], colors=INK)
        panel.grid(axis="y", visible=False)
        panel.margins(x=0.08)
    return figure, f"Scores, best {columns[0].title} first{_spread(comparison)}."


def _spread(comparison: Comparison) -> str:
    several = any(len(group.finished) > 1 for group in comparison.groups)
    marked = ", without the numbers that cannot be compared" if comparison.reasons else ""
    return (": the mean of the seeds, and lines from the lowest to the highest" if several else "") + marked


def _title(panel: Any, column: Column) -> None:
    better = "lower" if column.lower_is_better else "higher"
    panel.set_title(
        _plain(f"{shorten(column.group, 40, placeholder=' …')}\n{column.label} ({better} is better)".strip())
    )


def _stretch(panel: Any, values: list[float]) -> None:
    """Marks at the values where they are few; a logarithmic axis for those of very different sizes."""
    if min(values) > 0 and max(values) / min(values) > WIDE:
        panel.set_xscale("log")
    if len(distinct := sorted(set(values))) <= MOST_MARKS:
        panel.set_xticks(distinct, [shown(value) for value in distinct])
        panel.set_xticks([], minor=True)
    panel.margins(x=0.06, y=0.12)


def _plain(text: str) -> str:
    """A name as matplotlib should show it: dollar signs are no formulas."""
    return text.replace("$", r"\$")
