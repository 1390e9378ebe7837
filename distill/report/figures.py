"""All drawing, by matplotlib: the figures of a run, that of runs side by side, and the chart of a notebook.

A figure has panels of curves or of rows of dots. Figure objects are drawn without pyplot: no global state, no display.
The colours are those of Okabe and Ito (a darker purple), which people with any form of colour blindness can tell apart.
In SVG they become CSS variables, so that a page can lighten them on a dark background.
"""

import io
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import cycle
from pathlib import Path
from statistics import fmean
from textwrap import wrap
from typing import TYPE_CHECKING, Any, NamedTuple

from distill.report.page import Picture
from distill.report.words import is_number
from distill.runs.facts import HistoryPoint
from distill.runs.record import Record, term_titles
from distill.runtime.jsonl import LogLine

if TYPE_CHECKING:
    import pandas as pd

INK, RULE = "#22303c", "#d5dbe1"
MODELS = {"teacher": "#66717d", "student": "#0072b2", "baseline": "#d55e00"}
SERIES = ("#0072b2", "#009e73", "#b0588c", "#e69f00", "#56b4e9", "#8c6d31")  # of loss terms, in their order
CSS_NAMES = {
    INK: "currentColor",
    RULE: "var(--rule)",
    **{hue: f"var(--series-{number})" for number, hue in enumerate(SERIES, 1)},
    **{hue: f"var(--{name})" for name, hue in MODELS.items()},
}
STYLE = Path(__file__).parent / "templates" / "figures.mplstyle"
MAX_POINTS = 600  # of one curve; more would be drawn over each other
MAX_MARKED = 30  # points of a curve that are marked each
CROWDED = 20  # a largest value beyond so many medians makes the axis logarithmic
LETTERS = 96  # of titles across a figure
MINUTES = "minutes of training"
# Panels of a machine: their titles, and by label the name of a sample with what it is multiplied by.
MACHINE: dict[str, dict[str, tuple[str, float]]] = {
    "Cores in use": {"rank 0": ("process_cpu", 1)},
    "CPU, fraction of the host": {"busy": ("machine_cpu", 1)},
    "Memory, GiB": {"rank 0": ("process_memory", 2**-30), "free": ("memory_free", 2**-30)},
    "Network, MB/s": {"sent": ("network_sent", 1e-6), "received": ("network_received", 1e-6)},
    "GPU, fraction of the time": {"busy": ("gpu_busy", 1)},
    "GPU memory, GiB": {"used": ("gpu_memory", 2**-30)},
}


Drawn = tuple[Any, str]  # a figure, None where there is nothing to draw, and what it shows


class Curve(NamedTuple):
    """A curve in the panel of a title; `points`: a frame of two columns, places and values."""

    title: str
    label: str
    colour: str
    points: "pd.DataFrame"


def sheet(titles: Sequence[str], columns: int, height: float, names: int = 0, figure: Any = None) -> tuple[Any, list]:
    """A figure, and an area in it below each title.

    Args:
        columns: areas beside each other, at most.
        height: of an area, in inches.
        names: letters of the longest name at the left of the areas.
        figure: an empty one to be filled.
    """
    from matplotlib.figure import Figure

    columns = min(columns, len(titles))
    rows = math.ceil(len(titles) / columns)
    figure = figure or Figure(figsize=(7.6, height * rows), layout="constrained")
    areas = figure.subplots(rows, columns, squeeze=False).flatten().tolist()
    letters = max(12, round((LETTERS - names) / columns) - 2)  # without the numbers of the axis
    for area, title in zip(areas, titles, strict=False):
        area.set_title(plain("\n".join("\n".join(wrap(line, letters)) for line in title.splitlines())))
    for spare in areas[len(titles) :]:
        spare.set_visible(False)
    return figure, areas[: len(titles)]


def panels(
    curves: Sequence[Curve],
    axis: str,
    columns: int,
    marks: Sequence[float] = (),
    levels: Mapping[str, list[tuple[float, str, str]]] | None = None,
    from_zero: Collection[str] = (),
    figure: Any = None,
) -> Any:
    """A figure with a panel for each title of the curves; None where none has a point.

    Args:
        axis: what is below the lowest panels.
        marks: places of dotted lines in all of them.
        levels: dashed lines by title: their heights, colours and labels.
        from_zero: titles of panels whose vertical axis starts at 0; a few values far above all others are cut there.
    """
    from matplotlib.ticker import MaxNLocator

    titles = list(dict.fromkeys(curve.title for curve in curves if len(curve.points)))
    if not titles:
        return None
    figure, areas = sheet(titles, columns, 1.9, figure=figure)
    for title, area in zip(titles, areas, strict=True):
        shown = [curve for curve in curves if curve.title == title and len(curve.points)]
        highest = max(draw_curve(area, curve) for curve in shown)
        for level, colour, label in (levels or {}).get(title, ()):
            area.axhline(level, color=colour, linestyle="--", linewidth=1.2, label=plain(label))
        for place in marks:
            area.axvline(place, color=MODELS["baseline"], linewidth=0.8, linestyle=":")
        values = sorted(value for line in area.lines for value in line.get_ydata() if is_number(value))
        if title in from_zero:
            area.set_ylim(bottom=0, top=1.15 * highest or None)
        elif values[0] > 0 and values[-1] > CROWDED * values[len(values) // 2]:
            area.set_yscale("log")
        if area.get_yscale() == "linear":
            area.yaxis.set_major_locator(MaxNLocator(5))
            area.yaxis.set_major_formatter("{x:,g}")
        area.xaxis.set_major_locator(MaxNLocator(4, integer=axis in ("step", "epoch")))
        area.xaxis.set_major_formatter("{x:,g}")
    for area in areas[-columns:]:
        area.set_xlabel(plain(axis))
    return figure


def draw_curve(area: Any, curve: Curve) -> float:
    """Draw the values, faintly where there are many, with their moving average on top; what 98 % of them are below."""
    x, y = (curve.points[name] for name in curve.points)
    stride, width = math.ceil(len(x) / MAX_POINTS), 2 * (len(x) // 60) + 1
    if width > 1:
        area.plot(x[::stride], y[::stride], color=curve.colour, alpha=0.28, linewidth=0.8)
    marker = ("d" if curve.colour == MODELS["baseline"] else "o") if len(x) <= MAX_MARKED else None
    mean = y.rolling(width, center=True, min_periods=1).mean()
    area.plot(x[::stride], mean[::stride], color=curve.colour, marker=marker, label=plain(curve.label) or None)
    return float(y.quantile(0.98, interpolation="higher"))


def dots(
    shown: Mapping[str, Mapping[str, tuple[str, str, dict[int, list[float]]]]],
    rows: Sequence[str],
    height: float,
    line: tuple[str, float],
) -> Any:
    """A figure of panels beside each other with a row for each name: a dot for each mean, a line between all values.

    Args:
        shown: by the titles of the panels, then by label: colour, marker, and the values by row.
        height: of the figure, in inches.
        line: its colour and width.
    """
    figure, areas = sheet([*shown], len(shown), height, max(map(len, rows)))
    for area, series in zip(areas, shown.values(), strict=True):
        spans = dict[int, list[float]]()
        for label, (colour, marker, values) in series.items():
            means = [fmean(of_row) for of_row in values.values()]
            area.scatter(means, [*values], s=32, color=colour, marker=marker, label=label or None, zorder=2)
            for row, of_row in values.items():
                spans.setdefault(row, []).extend(of_row)
        for row, span in spans.items():
            area.hlines(row, min(span), max(span), color=line[0], linewidth=line[1], zorder=1)
        lowest, highest = min(map(min, spans.values())), max(map(max, spans.values()))
        if lowest > 0 and highest > 8 * lowest:
            area.set_xscale("log")
        area.set_ylim(len(rows) - 0.5, -0.5)
        area.set_yticks(range(len(rows)), [plain(row) for row in rows])
        area.tick_params(axis="y", labelleft=area.get_subplotspec().is_first_col())
        area.grid(axis="y", visible=False)
        area.margins(x=0.08)
    return figure


def legend_below(figure: Any) -> Any:
    """The figure with one legend of all panels, of each label once."""
    areas = figure.axes if figure else ()
    pairs = [pair for area in areas for pair in zip(*area.get_legend_handles_labels(), strict=True)]
    handles = {label: handle for handle, label in reversed(pairs)}
    if len(handles) > 1:
        labels = [*dict.fromkeys(label for _, label in pairs)]
        place = {"loc": "outside lower center", "ncols": min(3, len(labels)), "handletextpad": 0.4}
        figure.legend([handles[label] for label in labels], labels, **place)
    return figure


def legend_inside(figure: Any) -> Any:
    """The figure with a legend in each panel of several labels."""
    for area in figure.axes if figure else ():
        if len(area.get_legend_handles_labels()[0]) > 1:
            area.legend(loc="upper right", fontsize=7)
    return figure


def plain(text: str) -> str:
    """A name as matplotlib should show it: dollar signs are no formulas."""
    return text.replace("$", r"\$")


def points_of(lines: Any, x: str, y: str) -> "pd.DataFrame":
    """Two columns of the lines of a log, or of a frame of them, where both are finite numbers."""
    import pandas as pd

    frame = pd.DataFrame(lines).reindex(columns=[x, y]).apply(pd.to_numeric, errors="coerce")
    return frame.replace([math.inf, -math.inf], math.nan).dropna()


def draw(
    record: Record,
    metrics: Sequence[LogLine],
    folder: Path | None,
    samples: Mapping[str, Sequence[float]] | None = None,
) -> dict[str, Picture]:
    """Draw what there are numbers for, also as PNG into `folder`/plots; keys: the names of the figures.

    Args:
        metrics: lines of metrics.jsonl.
        samples: of the machine.
    """
    import pandas as pd

    frame = pd.DataFrame(metrics)
    makers: dict[str, Callable[[], Drawn]] = {
        "comparison": lambda: comparison(record),
        "history": lambda: history(record),
        "minutes": lambda: minutes(record),
        "loss": lambda: losses(record, frame),
        "optimizer": lambda: optimizer(frame),
        "throughput": lambda: speed(frame),
        "utilisation": lambda: utilisation(samples or {}),
    }
    drawn = {name: picture(name, make, folder) for name, make in makers.items()}
    return {name: made for name, made in drawn.items() if made is not None}


def picture(name: str, make: Callable[[], Drawn], folder: Path | None) -> Picture | None:
    """The figure of a page, also as `folder`/plots/`name`.png; None where `make` has nothing to draw."""
    import matplotlib

    with matplotlib.rc_context(fname=STYLE):
        figure, caption = make()
        return figure and Picture(f"plots/{name}.png", save_figure(figure, folder, name), caption)


def save_figure(figure: Any, folder: Path | None, name: str) -> str:
    """Write the PNG; give back the SVG elements, with colours as CSS variables and ids of this figure's area."""
    if folder is not None:
        from PIL import Image

        drawn = io.BytesIO()
        figure.savefig(drawn, format="png", dpi=150, facecolor="white")
        figure.set_layout_engine("none")  # all has its place now; to lay it out again takes as long as to draw it
        (folder / "plots").mkdir(parents=True, exist_ok=True)
        # A palette is enough for a drawing and takes a third of the space.
        Image.open(drawn).convert("RGB").quantize(64).save(folder / "plots" / f"{name}.png", optimize=True)
    buffer, nothing = io.StringIO(), dict.fromkeys(("Date", "Creator", "Format", "Type"))
    figure.savefig(buffer, format="svg", transparent=True, metadata=nothing)
    svg = buffer.getvalue()[buffer.getvalue().index("<svg") :]
    svg = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{name}-", svg)
    svg = re.sub(r'font: ([\d.]+)px [^;"]*', r"font-size: \1px", svg)
    for colour, css in CSS_NAMES.items():
        svg = svg.replace(colour, css)
    return svg.strip()


def losses(record: Record, metrics: "pd.DataFrame") -> Drawn:
    """A panel for each loss term, the weighted total first; with one term alone the total is that term again."""
    titles = term_titles(record)
    titles |= {key[5:]: key[5:] for key in metrics if key.startswith("loss/") and key[5:] not in titles}
    points = {name: points_of(metrics, "step", f"loss/{name}") for name in titles}
    shown = [name for name in titles if len(points[name])]
    shown = shown[1:] if len(shown) == 2 and shown[0] == "total" else shown
    colours = {"total": INK} | dict(zip((name for name in titles if name != "total"), cycle(SERIES), strict=False))
    titles["total"] = "Total (weighted sum)"
    # Before these steps some were skipped: those at which their running count has grown.
    skipped = points_of(metrics, "step", "skipped")
    marks = skipped.step[skipped.skipped.diff().fillna(skipped.skipped) > 0].tolist()
    caption = "Training loss by step: each logged value faintly, their moving average on top."
    curves = [Curve(titles[name], "", colours[name], points[name]) for name in shown]
    return panels(curves, "step", 2, marks), caption + " Dotted lines: skipped steps, not finite." * bool(marks)


def optimizer(metrics: "pd.DataFrame") -> Drawn:
    """Learning rate, gradient norm and, in fp16, the loss scale."""
    titles = {"lr": "Learning rate", "grad_norm": "Gradient norm, before clipping", "loss_scale": "Loss scale"}
    points = {title: points_of(metrics, "step", name) for name, title in titles.items()}
    shown = [title for title in points if len(points[title])]
    curves = [Curve(title, "", colour, points[title]) for title, colour in zip(shown, SERIES, strict=False)]
    return panels(curves, "step", 3, from_zero=[titles["lr"]]), f"{', '.join(shown).capitalize()}, by step."


def speed(metrics: "pd.DataFrame") -> Drawn:
    """Tokens a second, and the fraction of the time spent waiting for data."""
    titles = {"tokens_per_second": "Training tokens per second", "data_wait": "Waiting for data, % of the time"}
    curves = []
    for (name, title), colour in zip(titles.items(), (MODELS["student"], SERIES[3]), strict=True):
        points = points_of(metrics, "seconds", name)
        curves.append(Curve(title, "", colour, points * [1 / 60, 100 if name == "data_wait" else 1]))
    return panels(curves, MINUTES, 2, from_zero=[*titles.values()]), "Training throughput over time."


def comparison(record: Record) -> Drawn:
    """Teacher, student and baseline by every measure and set."""
    models = record.models()
    sets = list(
        dict.fromkeys(key for name in record.measures for of in models.values() for key in of.scores.get(name, {}))
    )
    shown = {}
    for name, measure in record.measures.items():
        title = f"{measure.title} ({'lower' if measure.lower_is_better else 'higher'} is better)"
        shown[title] = {
            model: (
                MODELS[model],
                marker,
                {row: [value] for row, key in enumerate(sets) if is_number(value := of.score(name, key))},
            )
            for (model, of), marker in zip(models.items(), "sod", strict=False)
        }
    shown = {title: series for title, series in shown.items() if any(values for _, _, values in series.values())}
    scored = {model for series in shown.values() for model, (_, _, values) in series.items() if values}
    others = {"teacher": "its teacher", "baseline": "the same student trained without a teacher"}
    if not scored & others.keys():
        return None, ""
    figure = dots(shown, [record.label_of(key) for key in sets], 0.85 + 0.42 * len(sets), (RULE, 3))
    named = [words for model, words in others.items() if model in scored]
    return legend_below(figure), f"How far the student is from {' and from '.join(named)}."


def history(record: Record) -> Drawn:
    """Every measure on every set by epoch or step."""
    by_measure = {name: _scored_sets(record, name) for name in record.measures}
    by_measure = {name: sets for name, sets in by_measure.items() if sets}
    if not by_measure or len(record.history) < 2:
        return None, ""
    columns = max(map(len, by_measure.values()))
    figure = _scores(record, by_measure, record.history_by, min(3, columns if columns > 1 else len(by_measure)))
    measured = " and ".join(record.measures[name].title.lower() for name in by_measure).capitalize()
    caption = f"{measured} {'by step' if record.history_by == 'step' else 'after each epoch'}."
    is_marked = record.best is not None and record.best.step in [point.step for point in record.history]
    return figure, caption + " Dotted line: the student that was kept." * is_marked


def minutes(record: Record) -> Drawn:
    """The first measure over the minutes of training, a panel for each set: how long for how good."""
    name, measure = record.first_measure
    if len([point for point in record.history if is_number(point.seconds)]) < 2:
        return None, ""
    figure = _scores(record, {name: _scored_sets(record, name)}, MINUTES, 3)
    return figure, f"{measure.title.lower().capitalize()} over the minutes of training, evaluation left out."


def _scored_sets(record: Record, measure: str) -> list[str]:
    return list(dict.fromkeys(key for point in record.history for key in point.scores.get(measure, {})))


def _scores(record: Record, sets: Mapping[str, list[str]], axis: str, columns: int) -> Any:
    """The scores of student and baseline by each measure on each of its sets, and the teacher's level."""
    is_whole = record.training.scored_sequences is None  # as the teacher's score is
    histories = {"student": record.history, "baseline": record.baseline.history if record.baseline else []}
    curves, levels = list[Curve](), dict[str, list[tuple[float, str, str]]]()
    for name, key in [(name, key) for name, keys in sets.items() for key in keys]:
        title = f"{record.label_of(key)}\n{record.measures[name].title.lower()}"
        curves += [
            Curve(title, model, MODELS[model], _points(points, name, key, axis)) for model, points in histories.items()
        ]
        if record.teacher and is_whole and is_number(level := record.teacher.score(name, key)):
            levels[title] = [(level, MODELS["teacher"], "teacher")]
    kept = [point for point in record.history if record.best is not None and point.step == record.best.step]
    marks = [place for point in kept if (place := _place(point, axis)) is not None]
    return legend_below(panels(curves, axis, columns, marks, levels))


def _points(points: Sequence[HistoryPoint], measure: str, key: str, axis: str) -> "pd.DataFrame":
    """The places and scores of the points of a history that have both."""
    return points_of([{"x": _place(point, axis), "y": point.score(measure, key)} for point in points], "x", "y")


def _place(point: HistoryPoint, axis: str) -> float | None:
    if axis == MINUTES:
        return point.seconds / 60 if is_number(point.seconds) else None
    return point.step if axis == "step" else point.epoch


def utilisation(samples: Mapping[str, Sequence[float]]) -> Drawn:
    """Processors, memory, network and GPU over time, by the names that `distill.runs.profile.sampler` gives them."""
    curves = [
        Curve(title, label * (len(of_panel) > 1), colour, points_of(samples, "seconds", name) * [1, scale])
        for title, of_panel in MACHINE.items()
        for colour, (label, (name, scale)) in zip(SERIES, of_panel.items(), strict=False)
    ]
    caption = "Utilisation over the time of training, of rank 0 and its host."
    return legend_inside(panels(curves, "seconds", 2, from_zero=[*MACHINE])), caption


def chart(record: Record, metrics: Sequence[LogLine], figure: Any) -> None:
    """Losses by step on the left; on the right the first measure of the student on every set, by epoch or step."""
    import matplotlib

    name, measure = record.first_measure
    curves = [
        Curve("Loss", title, colour, points_of(metrics, "step", f"loss/{term}"))
        for (term, title), colour in zip(term_titles(record).items(), cycle([INK, *SERIES]), strict=False)
    ]
    levels = dict[str, list[tuple[float, str, str]]]({measure.title: []})
    for key, colour in zip(record.sets_of(name), cycle(SERIES), strict=False):
        label = record.label_of(key)
        points = _points(record.history, name, key, record.history_by)
        curves.append(Curve(measure.title, f"student, {label}", colour, points))
        if record.teacher and is_number(level := record.teacher.score(name, key)):
            levels[measure.title].append((level, colour, f"teacher, {label}"))
    with matplotlib.rc_context(fname=STYLE):
        legend_inside(panels(curves, "step", 2, levels=levels, figure=figure))
        if len(figure.axes) > 1:
            figure.axes[1].set_xlabel(record.history_by)
