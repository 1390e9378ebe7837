"""All drawing: panels of curves and of dots, as PNG and SVG by matplotlib, or as SVG alone in a millisecond.

matplotlib's Figure objects are drawn without pyplot: no global state, no display. The colours are those of Okabe and
Ito (a darker purple), which people with any form of colour blindness can tell apart. In SVG they become CSS variables,
so that a page can lighten them on a dark background.
"""

import io
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from textwrap import wrap
from typing import Any

from distill.report.page import Picture, render
from distill.report.words import short

INK, RULE = "#22303c", "#d5dbe1"
MODELS = {"teacher": "#66717d", "student": "#0072b2", "baseline": "#d55e00"}
SERIES = ("#0072b2", "#009e73", "#b0588c", "#e69f00", "#56b4e9", "#8c6d31")  # of loss terms, in their order
CSS_NAMES = {
    INK: "currentColor",
    RULE: "var(--rule)",
    **{hue: f"var(--series-{number})" for number, hue in enumerate(SERIES, 1)},
    **{hue: f"var(--{name})" for name, hue in MODELS.items()},
}
STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 8,
    "axes.titlesize": 8.5,
    "axes.titlelocation": "left",
    "axes.titlepad": 7,
    "axes.edgecolor": RULE,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": RULE,
    "grid.linewidth": 0.6,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "ytick.minor.size": 0,
    "lines.linewidth": 1.6,
    "legend.frameon": False,
    "svg.fonttype": "none",  # text stays text: it takes the page's fonts and can be searched
    "svg.hashsalt": "distill",
}
MAX_POINTS = 600  # of one curve; more would be drawn over each other
MAX_MARKED = 30  # points of a curve that are marked each
MAX_TICKS = 6  # values of a setting that are on its axis
CROWDED = 20  # a largest value beyond so many medians, or smallest ones, makes the axis logarithmic
LETTERS = 96  # of titles across a figure
WIDTH, HEIGHT = 360, 198  # of a panel of SVG alone
LEFT, RIGHT, TOP, BOTTOM = 48, 10, 36, 34  # its margins


@dataclass
class Line:
    """One curve of a panel.

    Attributes:
        label: needed where a panel has several.
        smooth: the values faintly, and their moving average on top.
        marker: of each value, where there are not too many.
        steps: a value holds until the next one.
        joined: whether a line goes through the values.
        spread: the lowest and the highest value at each point.
        level: a dashed line at this value, in place of points.
    """

    x: list[float]
    y: list[float]
    colour: str
    label: str = ""
    smooth: bool = False
    marker: str = ""
    steps: bool = False
    joined: bool = True
    spread: list[tuple[float, float]] = field(default_factory=list)
    level: float | None = None


@dataclass
class Panel:
    """Curves over the same axes.

    Attributes:
        from_zero: the axis of the values begins at 0; else it is logarithmic where a few are far beyond the others.
        top: where that axis ends; None: where it has to.
        form: how its numbers are written.
        marks: where dotted lines stand, on the axis below.
        whole: the axis below counts steps or epochs, and few numbers are on both.
        settings: the values of a setting are that axis, these of them with their text.
    """

    title: str
    axis: str
    lines: list[Line]
    from_zero: bool = False
    top: float | None = None
    form: str = ""
    marks: list[float] = field(default_factory=list)
    whole: bool = False
    settings: dict[float, str] | None = None


@dataclass
class DotPanel:
    """A row for each name, with a dot for each series that has a value there, and a line through these.

    Attributes:
        series: by label: colour, marker, and the values by row.
        spans: the ends of the line of each row; empty: those of its dots, in a faint colour.
    """

    title: str
    rows: list[str]
    series: dict[str, tuple[str, str, dict[int, float]]]
    spans: dict[int, tuple[float, float]] = field(default_factory=dict)


@dataclass
class Sheet:
    """The panels of a figure, `height` inches each, and what it shows; its legend stands `below`, or `inside` each."""

    panels: Sequence[Panel | DotPanel]
    caption: str
    columns: int = 1
    height: float = 1.9
    legend: str = ""


def draw(sheet: Sheet, figure: Any = None) -> Any:
    """A figure, or this empty one, with the panels of the sheet."""
    import matplotlib

    with matplotlib.rc_context(STYLE):
        figure, axes = _grid(figure, len(sheet.panels), sheet.columns, sheet.height)
        for number, (area, panel) in enumerate(zip(axes, sheet.panels, strict=True)):
            area.set_title(plain(wrapped(panel.title, _letters(sheet))))
            if isinstance(panel, DotPanel):
                _dots(area, panel, with_names=number % sheet.columns == 0)
                continue
            _panel(area, panel)
            if number >= len(axes) - sheet.columns:
                area.set_xlabel(plain(panel.axis))
            if sheet.legend == "inside" and len(area.get_legend_handles_labels()[0]) > 1:
                area.legend(loc="upper right", fontsize=7)
        drawn = (pair for area in axes for pair in zip(*area.get_legend_handles_labels(), strict=True))
        handles = {label: handle for handle, label in reversed([*drawn])}  # of each label the first one
        if sheet.legend == "below" and len(handles) > 1:
            shown = dict(reversed(handles.items()))
            figure.legend(
                shown.values(), shown, loc="outside lower center", ncols=min(3, len(shown)), handletextpad=0.4
            )
    return figure


def picture(folder: Path, name: str, sheet: Sheet) -> Picture:
    """Draw a sheet into `folder`/plots/`name`.png, and for a page."""
    import matplotlib

    (folder / "plots").mkdir(parents=True, exist_ok=True)
    figure = draw(sheet)
    with matplotlib.rc_context(STYLE):
        return Picture(f"plots/{name}.png", save_figure(figure, folder, name), sheet.caption)


def _grid(figure: Any, count: int, columns: int, height: float) -> tuple[Any, list[Any]]:
    """The figure with axes for so many panels, and these."""
    from matplotlib.figure import Figure

    rows = math.ceil(count / columns)
    figure = figure or Figure(figsize=(7.6, height * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).flatten().tolist()
    for spare in axes[count:]:
        spare.set_visible(False)
    return figure, axes[:count]


def _panel(axes: Any, panel: Panel) -> None:
    from matplotlib.ticker import MaxNLocator

    for line in panel.lines:
        _line(axes, line)
    for mark in panel.marks:
        axes.axvline(mark, color=MODELS["baseline"], linewidth=0.8, linestyle=":")
    if panel.whole:
        axes.xaxis.set_major_locator(MaxNLocator(4, integer=True))
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.yaxis.set_major_locator(MaxNLocator(5))
    if panel.from_zero:
        axes.set_ylim(bottom=0, top=panel.top)
    elif is_crowded([value for line in panel.lines for value in line.y]):
        axes.set_yscale("log")
    if panel.form and not (panel.from_zero is False and axes.get_yscale() == "log"):
        axes.yaxis.set_major_formatter(panel.form)
    if panel.settings is not None:
        _stretch(axes, [value for line in panel.lines for value in line.x], panel.settings)


def _line(axes: Any, line: Line) -> None:
    if line.level is not None:
        axes.axhline(line.level, color=line.colour, linestyle="--", linewidth=1.2, label=line.label)
        return
    stride = math.ceil(len(line.x) / MAX_POINTS) or 1
    alone = "o" if len(line.x) == 1 and not line.marker else line.marker if len(line.x) <= MAX_MARKED else ""
    look: dict[str, Any] = {"color": line.colour, "marker": alone or None, "markersize": 4, "label": line.label or None}
    y = line.y
    if line.smooth:
        axes.plot(line.x[::stride], y[::stride], **{**look, "label": None}, alpha=0.28, linewidth=0.8)
        y, look["marker"] = smoothed(y, len(y) // 60), None
    if line.spread:
        low, high = zip(*line.spread, strict=True)
        axes.fill_between(line.x, low, high, color=line.colour, alpha=0.2, linewidth=0)
        axes.vlines(line.x, low, high, color=line.colour, linewidth=1)
    if not line.joined:
        axes.plot(line.x, y, **{**look, "marker": line.marker or "o", "markersize": 5}, linestyle="")
        return
    axes.plot(line.x[::stride], y[::stride], **look, drawstyle="steps-post" if line.steps else "default")


def _stretch(axes: Any, values: list[float], texts: dict[float, str]) -> None:
    """Texts at the values of a setting where they are few; a logarithmic axis for those of very different sizes."""
    if min(values) > 0 and max(values) / min(values) > CROWDED:
        axes.set_xscale("log")
    if len(texts) <= MAX_TICKS:
        axes.set_xticks(sorted(texts), [texts[value] for value in sorted(texts)])
        axes.set_xticks([], minor=True)
    axes.margins(x=0.06, y=0.12)


def _dots(axes: Any, panel: DotPanel, with_names: bool) -> None:
    """`with_names`: whether the names of the rows are at the left."""
    for row in range(len(panel.rows)):
        beside = [values[row] for _, _, values in panel.series.values() if row in values]
        if row in panel.spans:
            axes.hlines(row, *panel.spans[row], color=MODELS["student"], linewidth=1.5)
        elif beside and not panel.spans:
            axes.hlines(row, min(beside), max(beside), color=RULE, linewidth=3, zorder=1)
    for label, (colour, marker, values) in panel.series.items():
        axes.scatter(list(values.values()), list(values), s=32, color=colour, marker=marker, label=label, zorder=2)
    shown = [value for _, _, values in panel.series.values() for value in values.values()]
    if min(shown) > 0 and max(shown) > 8 * min(shown):
        axes.set_xscale("log")
    axes.set_ylim(len(panel.rows) - 0.5, -0.5)
    axes.set_yticks(range(len(panel.rows)), [plain(row) for row in panel.rows])
    axes.tick_params(axis="y", labelleft=with_names)
    axes.grid(axis="y", visible=False)
    axes.margins(x=0.08)


def _letters(sheet: Sheet) -> int:
    """How many letters of a title stand above a panel, beside the names of rows where there are any."""
    names = max((len(row) for panel in sheet.panels if isinstance(panel, DotPanel) for row in panel.rows), default=0)
    return max(12, round((LETTERS - names) / sheet.columns) - 2)  # without the numbers of the axis


def wrapped(text: str, letters: int) -> str:
    """A text in lines of so many letters at most."""
    return "\n".join("\n".join(wrap(line, letters)) for line in text.splitlines())


def plain(text: str) -> str:
    """A name as matplotlib should show it: dollar signs are no formulas."""
    return text.replace("$", r"\$")


def smoothed(values: Sequence[float], span: int) -> list[float]:
    """Mean of the values up to `span` positions to either side; near the ends of as many as there are on both."""
    sums = [0.0, *accumulate(values)]
    last = len(values) - 1
    reach = [min(span, at, last - at) for at in range(len(values))]
    return [(sums[i + r + 1] - sums[i - r]) / (2 * r + 1) for i, r in enumerate(reach)]


def is_crowded(values: Sequence[float]) -> bool:
    """Whether a few values are so large that nothing is seen of the others, and a logarithmic axis can show all."""
    return bool(values) and min(values) > 0 and max(values) > CROWDED * sorted(values)[len(values) // 2]


def save_figure(figure: Any, folder: Path, name: str) -> str:
    """Write the PNG; give back the SVG elements, with colours as CSS variables and ids of this figure's area."""
    from PIL import Image

    drawn = io.BytesIO()
    figure.savefig(drawn, format="png", dpi=150, facecolor="white")
    figure.set_layout_engine("none")  # all has its place now; to lay it out again takes as long as to draw it
    # A palette is enough for a drawing and takes a third of the space.
    Image.open(drawn).convert("RGB").quantize(64).save(folder / "plots" / f"{name}.png", optimize=True)
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None, "Format": None})
    svg = buffer.getvalue()[buffer.getvalue().index("<svg") :]
    svg = re.sub(r"\s*<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{name}-", svg)
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1))
    svg = re.sub(r'font: ([\d.]+)px [^;"]*', r"font-size: \1px", svg)
    for colour, css in CSS_NAMES.items():
        svg = svg.replace(colour, css)
    return svg.strip()


def svg_picture(panels: Sequence[Panel], caption: str) -> Picture:
    """Panels beside each other, as many as the width has room for, as SVG alone: a millisecond each."""
    return Picture("", f'<div class="panels">{"".join(map(svg_panel, panels))}</div>', caption)


def svg_panel(panel: Panel) -> str:
    """One panel as an SVG element; lines without points are left out."""
    lines = [line for line in panel.lines if line.x]
    geometry = _geometry(panel, lines) if lines else {}
    box = {
        "width": WIDTH,
        "height": HEIGHT,
        "left": LEFT,
        "right": WIDTH - RIGHT,
        "top": TOP,
        "bottom": HEIGHT - BOTTOM,
    }
    return render("panel.svg", title=panel.title, axis=panel.axis, **box, **geometry)


def _geometry(panel: Panel, lines: list[Line]) -> dict[str, Any]:
    """Where the parts of a panel stand: curves as class, colour and points, the others with their text."""
    log = not panel.from_zero and is_crowded([value for line in lines for value in line.y])
    heights = [[math.log10(value) for value in line.y] if log else line.y for line in lines]
    low, high = _range(heights)
    if panel.from_zero:
        low, high = 0.0, high if high > 0 else 1.0
    first, last = _range([line.x for line in lines])

    def place(value: float, begin: float, end: float, start: float, stop: float) -> float:
        return start + (value - begin) / (end - begin) * (stop - start)

    def across(value: float) -> float:
        return place(value, first, last, LEFT, WIDTH - RIGHT)

    def up(value: float) -> float:
        return place(value, low, high, HEIGHT - BOTTOM, TOP)

    levels: list[float] = list(range(math.ceil(low), math.floor(high) + 1)) if log else ticks(low, high)
    curves = []
    for line, values in zip(lines, heights, strict=True):
        versions = (
            [("faint", values), ("curve", smoothed(values, len(values) // 60))] if line.smooth else [("curve", values)]
        )
        for kind, ys in versions:
            points = " ".join(f"{across(x):.1f},{up(y):.1f}" for x, y in zip(line.x, ys, strict=True))
            curves.append((kind, CSS_NAMES[line.colour], points))
    return {
        "levels": [(up(level), amount(10.0**level if log else level)) for level in levels or [low, high]],
        "below": [(across(tick), amount(tick)) for tick in ticks(first, last)],
        "marks": [across(mark) for mark in panel.marks if lines[0].x[0] <= mark <= lines[0].x[-1]],
        "curves": curves,
        "legend": _legend(lines) if len(lines) > 1 else [],
    }


def _legend(lines: list[Line]) -> list[tuple[float, str, str]]:
    """Where the labels of several curves stand, from the right, with their colours."""
    entries, right = [], float(WIDTH - RIGHT)
    for line in reversed(lines):
        left = right - 6 * len(line.label) - 4
        entries.append((left, CSS_NAMES[line.colour], line.label))
        right = left - 22
    return entries


def ticks(low: float, high: float, count: int = 4) -> list[float]:
    """About so many round numbers between two."""
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [number * step for number in range(first, math.floor(high / step + 1e-9) + 1)]


def amount(value: float) -> str:
    """A number on an axis, in few characters."""
    if value and not 1e-3 <= abs(value) < 1e4:
        return short(value).replace(" ", "") if abs(value) >= 1e4 else f"{value:.2g}"
    return f"{value:.4g}"


def _range(many: Iterable[Sequence[float]]) -> tuple[float, float]:
    """The lowest and the highest value, apart from each other even where all are equal."""
    values = [value for numbers in many for value in numbers]
    low, high = min(values), max(values)
    room = abs(high) * 1e-3 or 1.0
    return (low, high) if high - low > abs(high) * 1e-9 else (low - room, high + room)
