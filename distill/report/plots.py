"""The figures of a report: a PNG for each under plots/, and the same drawing as SVG for the page.

Drawn with matplotlib's Figure objects alone, without pyplot: no global state, no display. The colours are those of
Okabe and Ito (a darker purple), which people with any form of colour blindness can tell apart. In the SVG they become
CSS variables, so that the page can lighten them on a dark background.
"""

import io
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, cycle
from pathlib import Path
from statistics import median
from textwrap import wrap
from typing import Any

from distill.report.lookup import axis_of, label_of, measures_of, titles_of_terms, usable

INK, RULE = "#22303c", "#d5dbe1"
MODELS = {"teacher": "#66717d", "student": "#0072b2", "twin": "#d55e00"}
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
MOST_POINTS = 600  # of one curve, raw; more would be drawn over each other
MOST_MARKED = 30  # points of a history that are marked each

Curves = dict[tuple[str, str], dict[int, list[float]]]  # by title: the values at each step


@dataclass
class Picture:
    """One figure: its file relative to the run folder, the same as SVG elements, and what it shows."""

    file: str
    svg: str
    caption: str


def draw(folder: Path, results: dict[str, Any], metrics: list[dict[str, Any]]) -> dict[str, Picture]:
    """Draw what there are numbers for into `folder`/plots; keys: comparison, history, minutes, loss, optimizer,
    throughput."""
    import matplotlib

    (folder / "plots").mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context(STYLE):
        drawn = {
            "comparison": _comparison(results),
            "history": _history(results),
            "minutes": _minutes(results),
            "loss": _loss(results, metrics),
            "optimizer": _optimizer(metrics),
            "throughput": _throughput(metrics),
        }
        return {
            name: Picture(f"plots/{name}.png", save_figure(figure[0], folder, name), figure[1])
            for name, figure in drawn.items()
            if figure
        }


def draw_by_step(folder: Path, name: str, curves: Curves) -> str:
    """Draw `figure_by_step` into plots/`name`.png, and give that file relative to `folder`."""
    import matplotlib

    (folder / "plots").mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context(STYLE):
        save_figure(figure_by_step(curves), folder, name)
    return f"plots/{name}.png"


def figure_by_step(curves: Curves) -> Any:
    """A panel for each curve: the medians of its values by step, and the ranges from the lowest to the highest.

    Args:
        curves: by their titles, of which each part begins a line; those with the same first part have one colour.
    """
    steps = [step for values in curves.values() for step in values]
    margin = 0.05 * (max(steps) - min(steps)) or 1
    colours = dict(zip(dict.fromkeys(first for first, _ in curves), cycle(SERIES), strict=False))
    columns = min(3, len(curves))
    figure, panels = make_panels(len(curves), columns, 2.0)
    for axes, (title, values) in zip(panels, curves.items(), strict=True):
        x = sorted(values)
        middle, low, high = ([of(values[step]) for step in x] for of in (median, min, max))
        colour = colours[title[0]]
        axes.fill_between(x, low, high, color=colour, alpha=0.2, linewidth=0)
        axes.vlines(x, low, high, color=colour, linewidth=1)
        axes.plot(x, middle, color=colour, marker="o", markersize=4)
        axes.set_xlim(min(steps) - margin, max(steps) + margin)
        axes.set_title(_plain("\n".join(line for part in title for line in wrap(part, 34))))
        _count_steps(axes)
    for axes in panels[-columns:]:
        axes.set_xlabel("step")
    return figure


def smoothed(values: Sequence[float], span: int) -> list[float]:
    """Mean of the values up to `span` positions to either side; near the ends of as many as there are on both."""
    sums = [0.0, *accumulate(values)]
    last = len(values) - 1
    reach = [min(span, at, last - at) for at in range(len(values))]
    return [(sums[i + r + 1] - sums[i - r]) / (2 * r + 1) for i, r in enumerate(reach)]


def make_panels(count: int, columns: int, height: float) -> tuple[Any, list[Any]]:
    """A figure with so many panels, `height` inches each, and these."""
    from matplotlib.figure import Figure

    rows = math.ceil(count / columns)
    figure = Figure(figsize=(7.6, height * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).flatten().tolist()
    for spare in axes[count:]:
        spare.set_visible(False)
    return figure, axes[:count]


def _plain(text: str) -> str:
    """A name as matplotlib should show it: dollar signs are no formulas."""
    return text.replace("$", r"\$")


def _points(metrics: Iterable[dict[str, Any]], x: str, y: str, scale: float = 1.0) -> tuple[list[float], list[float]]:
    pairs = [(line[x] * scale, line[y]) for line in metrics if usable(line.get(x)) and usable(line.get(y))]
    return [a for a, _ in pairs], [b for _, b in pairs]


def _curve(axes: Any, x: list[float], y: list[float], colour: str) -> None:
    """The values faintly, and their moving average over a thirtieth of the curve on top."""
    stride = math.ceil(len(x) / MOST_POINTS)
    alone = "o" if len(x) == 1 else None
    axes.plot(x[::stride], y[::stride], color=colour, alpha=0.28, linewidth=0.8, marker=alone)
    axes.plot(x[::stride], smoothed(y, len(y) // 60)[::stride], color=colour)


def _loss(results: dict[str, Any], metrics: list[dict[str, Any]]) -> tuple[Any, str] | None:
    titles = titles_of_terms(results)
    for line in metrics:
        titles |= {key[5:]: key[5:] for key in line if key.startswith("loss/") and key[5:] not in titles}
    curves = {term: _points(metrics, "step", f"loss/{term}") for term in titles}
    # With one term alone the total is that term again.
    shown = [term for term, (x, _) in curves.items() if x]
    shown = shown[1:] if len(shown) == 2 and shown[0] == "total" else shown
    if not shown:
        return None
    skipped = _skipped(metrics)
    colours = {"total": INK} | dict(zip((name for name in titles if name != "total"), cycle(SERIES), strict=False))
    figure, panels = make_panels(len(shown), min(2, len(shown)), 1.9)
    for axes, term in zip(panels, shown, strict=True):
        _curve(axes, *curves[term], colours[term])
        axes.set_title(_plain("Total (weighted sum)" if term == "total" else titles[term]))
        for step in skipped:
            axes.axvline(step, color=MODELS["twin"], linewidth=0.8, linestyle=":")
    for axes in panels[-2:]:
        axes.set_xlabel("step")
    caption = "Training loss by step: each logged value faintly, their moving average on top."
    return figure, caption + (" Dotted lines: skipped steps, not finite." if skipped else "")


def _skipped(metrics: list[dict[str, Any]]) -> list[float]:
    """Logged steps before which steps were skipped: those at which their running count has grown."""
    x, counts = _points(metrics, "step", "skipped")
    return [step for step, count, before in zip(x, counts, [0.0, *counts], strict=False) if count > before]


def _optimizer(metrics: list[dict[str, Any]]) -> tuple[Any, str] | None:
    titles = {"lr": "Learning rate", "grad_norm": "Gradient norm, before clipping", "loss_scale": "Loss scale"}
    curves = {key: _points(metrics, "step", key) for key in titles}
    shown = [key for key in titles if curves[key][0]]
    if not shown:
        return None
    figure, panels = make_panels(len(shown), len(shown), 1.9)
    for axes, key in zip(panels, shown, strict=True):
        x, y = curves[key]
        if key == "lr":
            axes.plot(x, y, color=MODELS["student"], marker="o" if len(x) == 1 else None)
            axes.yaxis.set_major_formatter("{x:g}")
            axes.set_ylim(bottom=0)
        elif key == "loss_scale":
            axes.step(x, y, color=SERIES[2], where="post", marker="o" if len(x) == 1 else None)
            axes.set_yscale("log", base=2)
        else:
            _curve(axes, x, y, SERIES[1])
            if min(y) > 0 and max(y) > 20 * sorted(y)[len(y) // 2]:
                axes.set_yscale("log")
        axes.set_title(titles[key])
        axes.set_xlabel("step")
    return figure, f"{', '.join(titles[key] for key in shown).capitalize()}, by step."


def _throughput(metrics: list[dict[str, Any]]) -> tuple[Any, str] | None:
    x, y = _points(metrics, "seconds", "tokens_per_second", 1 / 60)
    if not x:
        return None
    figure, (axes,) = make_panels(1, 1, 1.9)
    _curve(axes, x, y, MODELS["student"])
    axes.set_ylim(bottom=0, top=1.15 * sorted(y)[math.ceil(0.98 * len(y)) - 1] or None)
    axes.set_title("Training tokens per second")
    axes.set_xlabel("minutes of training")
    axes.yaxis.set_major_formatter("{x:,.0f}")
    return figure, "Training throughput over time."


def _comparison(results: dict[str, Any]) -> tuple[Any, str] | None:
    models = {name: results[name] for name in ("teacher", "student", "twin") if results.get(name)}
    titles = {name: measure["title"] for name, measure in measures_of(results).items()}
    values = {
        measure: {
            name: {key: value for key, value in (model.get(measure) or {}).items() if usable(value) and value > 0}
            for name, model in models.items()
        }
        for measure in titles
    }
    shown = [measure for measure in titles if any(values[measure].values())]
    if len(models) < 2 or not shown:
        return None
    sets = list(dict.fromkeys(key for measure in shown for named in values[measure].values() for key in named))
    figure, panels = make_panels(len(shown), len(shown), 0.85 + 0.42 * len(sets))
    for axes, measure in zip(panels, shown, strict=True):
        _dots(axes, values[measure], sets)
        better = "lower" if measures_of(results)[measure].get("lower_is_better", True) else "higher"
        axes.set_title(_plain(f"{titles[measure]} ({better} is better)"))
        axes.set_yticks(range(len(sets)), [_plain(label_of(results, key)) for key in sets])
        axes.tick_params(axis="y", labelleft=axes is panels[0])
    figure.legend(
        *panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(models), handletextpad=0.2
    )
    return figure, "How far the student is from its teacher" + (
        " and from the same student trained without one." if "twin" in models else "."
    )


def _dots(axes: Any, values: dict[str, dict[str, float]], sets: list[str]) -> None:
    everything = [value for named in values.values() for value in named.values()]
    for row, key in enumerate(sets):
        of_set = [named[key] for named in values.values() if key in named]
        axes.hlines(row, min(of_set, default=0), max(of_set, default=0), color=RULE, linewidth=3, zorder=1)
    for (name, named), marker in zip(values.items(), "sod", strict=False):
        x, y = [named[key] for key in sets if key in named], [row for row, key in enumerate(sets) if key in named]
        axes.scatter(x, y, s=34, color=MODELS[name], marker=marker, label=name, zorder=2)
    if max(everything) > 8 * min(everything):
        axes.set_xscale("log")
    axes.set_ylim(len(sets) - 0.5, -0.5)
    axes.grid(axis="y", visible=False)
    axes.margins(x=0.08)


def _history(results: dict[str, Any]) -> tuple[Any, str] | None:
    histories = {
        "student": results.get("history") or [],
        "twin": (results.get("twin") or {}).get("history") or [],
    }
    titles = {name: measure["title"].lower() for name, measure in measures_of(results).items()}
    panels_of = [
        (measure, key)
        for measure in titles
        for key in dict.fromkeys(key for line in histories["student"] for key in line.get(measure) or {})
    ]
    if not panels_of or len(histories["student"]) < 2:
        return None
    first = panels_of[0][0]
    columns = min(3, len([measure for measure, _ in panels_of if measure == first]))
    figure, panels = make_panels(len(panels_of), columns, 1.9)
    for axes, (measure, key) in zip(panels, panels_of, strict=True):
        _by_point(axes, histories, measure, key, axis_of(results))
        level = ((results.get("teacher") or {}).get(measure) or {}).get(key)
        if usable(level):
            axes.axhline(level, color=MODELS["teacher"], linestyle="--", linewidth=1.2, label="teacher")
        axes.set_title(_plain(f"{label_of(results, key)}\n{titles[measure]}"))
    for axes in panels[-columns:]:
        axes.set_xlabel(axis_of(results))
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3)
    measured = " and ".join(dict.fromkeys(titles[measure] for measure, _ in panels_of)).capitalize()
    return figure, f"{measured} {'by step' if axis_of(results) == 'step' else 'after each epoch'}."


def _by_point(axes: Any, histories: dict[str, list[dict[str, Any]]], measure: str, key: str, axis: str) -> None:
    for (name, history), marker in zip(histories.items(), "od", strict=True):
        lines = [{axis: line.get(axis), "y": (line.get(measure) or {}).get(key)} for line in history]
        x, y = _points(lines, axis, "y")
        if x:
            size = 4 if len(x) <= MOST_MARKED else 0
            axes.plot(x, y, color=MODELS[name], marker=marker, markersize=size, label=name)
    _count_steps(axes)


def _minutes(results: dict[str, Any]) -> tuple[Any, str] | None:
    """The first measure over the minutes of training, a panel for each set: how long for how good."""
    from matplotlib.ticker import MaxNLocator

    results, where = _with_curve(results)
    histories = {"student": results.get("history") or [], "twin": (results.get("twin") or {}).get("history") or []}
    measure = next(iter(measures_of(results)), "")
    keys = list(dict.fromkeys(key for line in histories["student"] for key in line.get(measure) or {}))
    timed = [line for line in histories["student"] if usable(line.get("seconds"))]
    if not keys or len(timed) < 2:
        return None
    title = measures_of(results)[measure]["title"].lower()
    timed_by = {
        name: [line | {"minutes": line["seconds"] / 60} for line in history if usable(line.get("seconds"))]
        for name, history in histories.items()
    }
    figure, panels = make_panels(len(keys), min(3, len(keys)), 1.9)
    for axes, key in zip(panels, keys, strict=True):
        _by_point(axes, timed_by, measure, key, "minutes")
        level = ((results.get("teacher") or {}).get(measure) or {}).get(key)
        if usable(level):
            axes.axhline(level, color=MODELS["teacher"], linestyle="--", linewidth=1.2, label="teacher")
        axes.set_title(_plain(f"{label_of(results, key)}\n{title}"))
        axes.xaxis.set_major_locator(MaxNLocator(4))
        axes.xaxis.set_major_formatter("{x:,.3g}")
        axes.set_xlabel("minutes of training")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3)
    return figure, f"{title.capitalize()} over the minutes of training, evaluation left out{where}."


def _with_curve(results: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """The results with the scores on a few rows as their history, and a remark, where a run has these."""
    curve = results.get("curve") or {}
    if len(curve.get("student") or []) < 2:
        return results, ""
    measure, key = curve["measure"], curve["set"]
    twin = (results.get("twin") or {}).get("curve") or {}
    same = all(twin.get(name) == curve[name] for name in ("measure", "set", "rows"))

    def history(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [line | {measure: {key: line["score"]}} for line in lines]

    shown = {"history": history(curve["student"]), "teacher": {measure: {key: curve["teacher"]}}}
    shown["twin"] = {"history": history(twin.get("student") or [] if same else [])}
    return results | shown, f"; on {curve['rows']} rows, so that scoring takes no time"


def _count_steps(axes: Any) -> None:
    """Few marks on both axes; those on the axis of steps or epochs are whole numbers."""
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(4, integer=True))
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.yaxis.set_major_locator(MaxNLocator(5))


def save_figure(figure: Any, folder: Path, name: str) -> str:
    """Write the PNG; give back the SVG elements, with colours as CSS variables and ids of this figure's own."""
    from PIL import Image

    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=150, facecolor="white")
    figure.set_layout_engine("none")  # all has its place now; to lay it out again takes as long as to draw it
    # A palette is enough for a drawing and takes a third of the space.
    Image.open(picture).convert("RGB").quantize(64).save(folder / "plots" / f"{name}.png", optimize=True)
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
