"""Curves as SVG for a page that is written while its run goes on: a millisecond each, without a library."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape

from distill.report.page import short
from distill.report.plots import Picture, smoothed

WIDTH, HEIGHT = 360, 198
LEFT, RIGHT, TOP, BOTTOM = 48, 10, 36, 34  # margins of the panel
CROWDED = 20  # a largest value beyond so many medians asks for a logarithmic axis


@dataclass
class Line:
    """One curve of a panel; `colour` is one of CSS, `label` is needed where a panel has several."""

    x: list[float]
    y: list[float]
    colour: str
    label: str = ""
    smooth: bool = False  # the values faintly, and their moving average on top


@dataclass
class Panel:
    """Curves over the same axes.

    Attributes:
        from_zero: the axis of the values begins at 0.
        marks: where dotted lines stand, on the axis below.
    """

    title: str
    axis: str
    lines: list[Line]
    from_zero: bool = False
    marks: list[float] = field(default_factory=list)


def picture(panels: list[Panel], caption: str) -> Picture:
    """Panels beside each other, as many as the width has room for."""
    return Picture("", f'<div class="panels">{"".join(map(draw, panels))}</div>', caption)


def draw(panel: Panel) -> str:
    """One panel as an SVG element; lines without points are left out."""
    lines = [line for line in panel.lines if line.x]
    body = _content(panel, lines) if lines else [_text(LEFT, HEIGHT / 2, "no values yet", "start")]
    title = f'<text x="{LEFT - 40}" y="14" class="title">{escape(panel.title)}</text>'
    label = escape(panel.title)
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">{title}{"".join(body)}</svg>'


def _content(panel: Panel, lines: list[Line]) -> list[str]:
    x_ticks = ticks(*_range([line.x for line in lines]))
    to_x = Scale(*_range([line.x for line in lines]), LEFT, WIDTH - RIGHT)
    values = [value for line in lines for value in line.y]
    log = not panel.from_zero and min(values) > 0 and max(values) > CROWDED * sorted(values)[len(values) // 2]
    shown = {id(line): [math.log10(value) for value in line.y] if log else line.y for line in lines}
    low, high = _range(list(shown.values()))
    if panel.from_zero:
        low, high = 0.0, high if high > 0 else 1.0
    to_y = Scale(low, high, HEIGHT - BOTTOM, TOP)
    levels = [power for power in range(math.ceil(low), math.floor(high) + 1)] if log else ticks(low, high)
    parts = [_level(to_y(level), amount(10.0**level if log else level)) for level in levels or [low, high]]
    parts += [_text(to_x(tick), HEIGHT - BOTTOM + 13, amount(tick), "middle") for tick in x_ticks]
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 6, panel.axis, "middle"))
    parts += [
        f'<path class="mark" d="M{to_x(mark):.1f} {TOP}V{HEIGHT - BOTTOM}"/>'
        for mark in panel.marks
        if lines[0].x[0] <= mark <= lines[0].x[-1]
    ]
    for line in lines:
        x, y = [to_x(value) for value in line.x], [to_y(value) for value in shown[id(line)]]
        if line.smooth:
            parts.append(_path(x, y, line.colour, "faint"))
            y = [to_y(value) for value in smoothed(shown[id(line)], len(y) // 60)]
        parts.append(_path(x, y, line.colour, "curve"))
    return parts + _legend(lines)


def _legend(lines: list[Line]) -> list[str]:
    """The labels of several curves, at the right above them, each behind a piece of its curve."""
    parts, right = [], float(WIDTH - RIGHT)
    for line in reversed(lines if len(lines) > 1 else []):
        left = right - 6 * len(line.label) - 4
        parts.append(f'<path class="curve" stroke="{line.colour}" d="M{left - 12:.0f} {TOP - 10}h10"/>')
        parts.append(_text(left, TOP - 6, line.label, "start"))
        right = left - 22
    return parts


def ticks(low: float, high: float, wanted: int = 4) -> list[float]:
    """About so many round numbers between two."""
    rough = (high - low) / wanted
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
    values = [value for each in many for value in each]
    low, high = min(values), max(values)
    room = abs(high) * 1e-3 or 1.0
    return (low, high) if high - low > abs(high) * 1e-9 else (low - room, high + room)


@dataclass(frozen=True)
class Scale:
    """From values to positions in the panel."""

    low: float
    high: float
    begin: float
    end: float

    def __call__(self, value: float) -> float:
        return self.begin + (value - self.low) / (self.high - self.low) * (self.end - self.begin)


def _path(x: list[float], y: list[float], colour: str, kind: str) -> str:
    if len(x) == 1:
        return f'<circle cx="{x[0]:.1f}" cy="{y[0]:.1f}" r="3" fill="{colour}"/>'
    points = " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(x, y, strict=True))
    return f'<polyline class="{kind}" stroke="{colour}" points="{points}"/>'


def _level(y: float, label: str) -> str:
    line = f'<path class="level" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>'
    return line + _text(LEFT - 5, y + 3.5, label, "end")


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
