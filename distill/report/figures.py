"""All drawing, by matplotlib: the figures of a run, that of runs side by side, and the chart of a notebook.

Figure objects are drawn without pyplot: no global state, no display. The colours are those of Okabe and Ito (a darker
purple), which people with any form of colour blindness can tell apart. In SVG they become CSS variables, so that a page
can lighten them on a dark background.
"""

import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import cycle
from pathlib import Path
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
    "lines.markersize": 4,
    "legend.frameon": False,
    "svg.fonttype": "none",  # text stays text: it takes the page's fonts and can be searched
    "svg.hashsalt": "distill",
}
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


Drawn = tuple[Any, str]  # a figure, and what it shows


class Sheet(NamedTuple):
    """A figure with its panels."""

    figure: Any
    areas: list[Any]


def sheet(
    titles: Sequence[str], axis: str = "", columns: int = 1, height: float = 1.9, names: int = 0, figure: Any = None
) -> Sheet:
    """A figure with a panel for each title.

    Args:
        axis: what is below the lowest ones.
        height: of a panel, in inches.
        names: letters of the longest name at the left of the panels.
        figure: an empty one to be filled.
    """
    from matplotlib.figure import Figure

    rows = math.ceil(len(titles) / columns)
    figure = figure or Figure(figsize=(7.6, height * rows), layout="constrained")
    areas = figure.subplots(rows, columns, squeeze=False).flatten().tolist()
    letters = max(12, round((LETTERS - names) / columns) - 2)  # without the numbers of the axis
    for area, title in zip(areas, titles, strict=False):
        area.set_title(plain("\n".join("\n".join(wrap(line, letters)) for line in title.splitlines())))
    for spare in areas[len(titles) :]:
        spare.set_visible(False)
    for area in areas[max(0, len(titles) - columns) : len(titles)]:
        area.set_xlabel(plain(axis))
    return Sheet(figure, areas[: len(titles)])


def curve(area: Any, x: Any, y: Any, colour: str, label: str = "", marker: str = "", smooth: bool = False) -> None:
    """A curve of two pandas series; `smooth`: the values faintly, and their moving average on top."""
    stride = math.ceil(len(x) / MAX_POINTS) or 1
    if smooth:
        area.plot(x[::stride], y[::stride], color=colour, alpha=0.28, linewidth=0.8)
        if (y > 0).all() and y.max() > CROWDED * y.median():
            area.set_yscale("log")
        y = y.rolling(2 * (len(y) // 60) + 1, center=True, min_periods=1).mean()
    shown = marker if len(x) <= MAX_MARKED else ""
    look = {"color": colour, "marker": shown or ("o" if len(x) == 1 else None), "label": plain(label) or None}
    area.plot(x[::stride], y[::stride], **look)


def marks(area: Any, places: Sequence[float]) -> None:
    """Dotted lines at these places of the axis below."""
    for place in places:
        area.axvline(place, color=MODELS["baseline"], linewidth=0.8, linestyle=":")


def dots(area: Any, rows: Sequence[str], series: Mapping[str, tuple[str, str, dict[int, float]]], spans: Any) -> None:
    """A row for each name, with a dot for each series that has a value there.

    Args:
        series: by label: colour, marker, and the values by row.
        spans: the ends of a line for each row that has one, and its colour and width.
    """
    for row, (low, high, colour, width) in spans.items():
        area.hlines(row, low, high, color=colour, linewidth=width, zorder=1)
    for label, (colour, marker, values) in series.items():
        area.scatter([*values.values()], [*values], s=32, color=colour, marker=marker, label=label or None, zorder=2)
    shown = [value for _, _, values in series.values() for value in values.values()]
    if min(shown) > 0 and max(shown) > 8 * min(shown):
        area.set_xscale("log")
    area.set_ylim(len(rows) - 0.5, -0.5)
    area.set_yticks(range(len(rows)), [plain(row) for row in rows])
    area.tick_params(axis="y", labelleft=area.get_subplotspec().is_first_col())
    area.grid(axis="y", visible=False)
    area.margins(x=0.08)


def legend_below(drawn: Sheet) -> None:
    """One legend of all panels, of each label once."""
    pairs = [pair for area in drawn.areas for pair in zip(*area.get_legend_handles_labels(), strict=True)]
    handles = {label: handle for handle, label in reversed(pairs)}
    if len(handles) > 1:
        labels = [*dict.fromkeys(label for _, label in pairs)]
        place = {"loc": "outside lower center", "ncols": min(3, len(labels)), "handletextpad": 0.4}
        drawn.figure.legend([handles[label] for label in labels], labels, **place)


def plain(text: str) -> str:
    """A name as matplotlib should show it: dollar signs are no formulas."""
    return text.replace("$", r"\$")


def frame_of(metrics: Sequence[LogLine]) -> "pd.DataFrame":
    """The lines of metrics.jsonl, with nan for what is no finite number."""
    import pandas as pd

    frame = pd.DataFrame(metrics).apply(pd.to_numeric, errors="coerce")
    return frame.replace([math.inf, -math.inf], math.nan)


def points_of(frame: "pd.DataFrame", x: str, y: str) -> tuple[Any, Any]:
    """The values of two columns in the lines that have both."""
    both = frame.reindex(columns=[x, y]).dropna()
    return both[x], both[y]


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
    frame = frame_of(metrics)
    makers: dict[str, Callable[[], Drawn | None]] = {
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


def picture(name: str, make: Callable[[], Drawn | None], folder: Path | None) -> Picture | None:
    """The figure of a page, also as `folder`/plots/`name`.png; None where `make` has nothing to draw."""
    import matplotlib

    with matplotlib.rc_context(STYLE):
        drawn = make()
        if drawn is None:
            return None
        figure, caption = drawn
        return Picture(f"plots/{name}.png", save_figure(figure, folder, name), caption)


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


def losses(record: Record, metrics: "pd.DataFrame") -> Drawn | None:
    """A panel for each loss term, the weighted total first; with one term alone the total is that term again."""
    titles = term_titles(record)
    titles |= {key[5:]: key[5:] for key in metrics if key.startswith("loss/") and key[5:] not in titles}
    titles["total"] = "Total (weighted sum)"
    colours = {"total": INK} | dict(zip((name for name in titles if name != "total"), cycle(SERIES), strict=False))
    curves = {name: points_of(metrics, "step", f"loss/{name}") for name in titles}
    shown = [name for name, (x, _) in curves.items() if len(x)]
    shown = shown[1:] if len(shown) == 2 and shown[0] == "total" else shown
    if not shown:
        return None
    made = sheet([titles[name] for name in shown], "step", min(2, len(shown)))
    # Before these steps some were skipped: those at which their running count has grown.
    steps, counts = points_of(metrics, "step", "skipped")
    skipped = steps[counts.diff().fillna(counts) > 0].tolist()
    for area, name in zip(made.areas, shown, strict=True):
        curve(area, *curves[name], colours[name], smooth=True)
        marks(area, skipped)
    caption = "Training loss by step: each logged value faintly, their moving average on top."
    caption += " Dotted lines: skipped steps, not finite." if skipped else ""
    return made.figure, caption


def optimizer(metrics: "pd.DataFrame") -> Drawn | None:
    """Learning rate, gradient norm and, in fp16, the loss scale."""
    titles = {"lr": "Learning rate", "grad_norm": "Gradient norm, before clipping", "loss_scale": "Loss scale"}
    curves = {name: points for name in titles if len((points := points_of(metrics, "step", name))[0])}
    if not curves:
        return None
    made = sheet([titles[name] for name in curves], "step", len(curves))
    for (name, points), area, colour in zip(curves.items(), made.areas, SERIES, strict=False):
        curve(area, *points, colour, smooth=name == "grad_norm")
        if name == "lr":
            area.set_ylim(bottom=0)
            area.yaxis.set_major_formatter("{x:g}")
    caption = f"{', '.join(titles[name] for name in curves).capitalize()}, by step."
    return made.figure, caption


def speed(metrics: "pd.DataFrame") -> Drawn | None:
    """Tokens a second, and the fraction of the time spent waiting for data."""
    seconds, tokens = points_of(metrics, "seconds", "tokens_per_second")
    if not len(seconds):
        return None
    waits = points_of(metrics, "seconds", "data_wait")
    titles = ["Training tokens per second", *["Waiting for data, % of the time"][: len(waits[0])]]
    made = sheet(titles, MINUTES, len(titles))
    curve(made.areas[0], seconds / 60, tokens, MODELS["student"], smooth=True)
    made.areas[0].set_yscale("linear")
    # A few that are far above all others are cut.
    made.areas[0].set_ylim(bottom=0, top=1.15 * tokens.quantile(0.98, interpolation="higher") or None)
    made.areas[0].yaxis.set_major_formatter("{x:,.0f}")
    for area in made.areas[1:]:
        curve(area, waits[0] / 60, 100 * waits[1], SERIES[3])
        area.set_ylim(bottom=0)
    caption = "Training throughput over time."
    return made.figure, caption


def comparison(record: Record) -> Drawn | None:
    """Teacher, student and baseline by every measure and set."""
    models = record.models()
    values = {
        measure: {
            name: {key: value for key, value in model.scores.get(measure, {}).items() if is_number(value) and value > 0}
            for name, model in models.items()
        }
        for measure in record.measures
    }
    shown = [measure for measure in record.measures if any(values[measure].values())]
    if len(models) < 2 or not shown:
        return None
    sets = list(dict.fromkeys(key for measure in shown for by_set in values[measure].values() for key in by_set))
    rows = [record.label_of(key) for key in sets]
    better = {measure: "lower" if record.measures[measure].lower_is_better else "higher" for measure in shown}
    titles = [f"{record.measures[measure].title} ({better[measure]} is better)" for measure in shown]
    made = sheet(titles, "", len(shown), 0.85 + 0.42 * len(sets), max(map(len, rows)))
    for area, measure in zip(made.areas, shown, strict=True):
        series = {
            name: (MODELS[name], marker, {sets.index(key): value for key, value in by_set.items()})
            for (name, by_set), marker in zip(values[measure].items(), "sod", strict=False)
        }
        beside = {row: [of[row] for _, _, of in series.values() if row in of] for row in range(len(rows))}
        dots(area, rows, series, {row: (min(of), max(of), RULE, 3) for row, of in beside.items() if of})
    legend_below(made)
    baseline = " and from the same student trained without one." if "baseline" in models else "."
    caption = f"How far the student is from its teacher{baseline}"
    return made.figure, caption


def history(record: Record) -> Drawn | None:
    """Every measure on every set by epoch or step."""
    keys = [(measure, key) for measure in record.measures for key in _scored_sets(record, measure)]
    if not keys or len(record.history) < 2:
        return None
    sets = len([measure for measure, _ in keys if measure == keys[0][0]])
    made = _score_panels(record, keys, record.history_by, min(3, sets if sets > 1 else len(keys)))
    measured = " and ".join(dict.fromkeys(record.measures[measure].title.lower() for measure, _ in keys)).capitalize()
    caption = f"{measured} {'by step' if record.history_by == 'step' else 'after each epoch'}."
    is_marked = record.best is not None and record.best.step in [point.step for point in record.history]
    caption += " Dotted line: the student that was kept." if is_marked else ""
    return made.figure, caption


def minutes(record: Record) -> Drawn | None:
    """The first measure over the minutes of training, a panel for each set: how long for how good."""
    measure, described = record.first_measure
    keys = [(measure, key) for key in _scored_sets(record, measure)]
    if not keys or len([point for point in record.history if is_number(point.seconds)]) < 2:
        return None
    made = _score_panels(record, keys, MINUTES, min(3, len(keys)))
    title = described.title.lower().capitalize()
    caption = f"{title} over the minutes of training, evaluation left out."
    return made.figure, caption


def _scored_sets(record: Record, measure: str) -> list[str]:
    return list(dict.fromkeys(key for point in record.history for key in point.scores.get(measure, {})))


def _score_panels(record: Record, keys: Sequence[tuple[str, str]], axis: str, columns: int) -> Sheet:
    """The scores of student and baseline on each set, and the teacher's level."""
    titles = [f"{record.label_of(key)}\n{record.measures[measure].title.lower()}" for measure, key in keys]
    made = sheet(titles, axis, columns)
    histories = {"student": record.history, "baseline": record.baseline.history if record.baseline else []}
    kept = [point for point in record.history if record.best is not None and point.step == record.best.step]
    for area, (measure, key) in zip(made.areas, keys, strict=True):
        for (name, points), marker in zip(histories.items(), "od", strict=True):
            x, y = _points(points, measure, key, axis)
            if len(x):
                curve(area, x, y, MODELS[name], name, marker)
        is_whole = record.training.scored_sequences is None  # as the teacher's score is
        level = record.teacher.score(measure, key) if record.teacher and is_whole else None
        if is_number(level):
            area.axhline(level, color=MODELS["teacher"], linestyle="--", linewidth=1.2, label="teacher")
        marks(area, [place for point in kept if (place := _place(point, axis)) is not None])
        _count_axis(area, axis)
    legend_below(made)
    return made


def _count_axis(area: Any, axis: str) -> None:
    """Few numbers on both axes, and whole ones below, where these count steps or epochs."""
    from matplotlib.ticker import MaxNLocator

    if axis != MINUTES:
        area.xaxis.set_major_locator(MaxNLocator(4, integer=True))
        area.xaxis.set_major_formatter("{x:,.0f}")
    lines = [value for line in area.lines for value in line.get_ydata() if is_number(value)]
    if lines and min(lines) > 0 and max(lines) > CROWDED * sorted(lines)[len(lines) // 2]:
        area.set_yscale("log")
    else:
        area.yaxis.set_major_locator(MaxNLocator(5))


def _points(points: Sequence[HistoryPoint], measure: str, key: str, axis: str) -> tuple[Any, Any]:
    """The places and scores of the points of a history that have both."""
    lines = [{"x": _place(point, axis), "y": point.score(measure, key)} for point in points]
    return points_of(frame_of(lines), "x", "y")


def _place(point: HistoryPoint, axis: str) -> float | None:
    if axis == MINUTES:
        return point.seconds / 60 if is_number(point.seconds) else None
    return point.step if axis == "step" else point.epoch


def utilisation(samples: Mapping[str, Sequence[float]]) -> Drawn | None:
    """Processors, memory, network and GPU over time, by the names that `distill.runs.profile.sampler` gives them."""
    import pandas as pd

    seconds = pd.Series(samples.get("seconds", []), dtype=float)
    panels = {
        title: {label: of for label, of in curves.items() if of[0] in samples} for title, curves in MACHINE.items()
    }
    panels = {title: curves for title, curves in panels.items() if curves}
    if not len(seconds) or not panels:
        return None
    made = sheet([*panels], "seconds", 2, 1.7)
    for area, curves in zip(made.areas, panels.values(), strict=True):
        for colour, (label, (name, scale)) in zip(SERIES, curves.items(), strict=False):
            curve(area, seconds, scale * pd.Series(samples[name]), colour, label)
        area.set_ylim(bottom=0)
        if len(curves) > 1:
            area.legend(loc="upper right", fontsize=7)
    caption = "Utilisation over the time of training, of rank 0 and its host."
    return made.figure, caption


def chart(record: Record, metrics: Sequence[LogLine], figure: Any) -> None:
    """Losses by step on the left; on the right the first measure of the student on every set, by epoch or step."""
    import matplotlib

    with matplotlib.rc_context(STYLE):
        measure, described = record.first_measure
        left, right = sheet(["Loss", described.title], columns=2, figure=figure).areas
        left.set_xlabel("step")
        right.set_xlabel(record.history_by)
        frame = frame_of(metrics)
        for (name, title), colour in zip(term_titles(record).items(), cycle([INK, *SERIES]), strict=False):
            x, y = points_of(frame, "step", f"loss/{name}")
            if len(x):
                curve(left, x, y.rolling(2 * (len(y) // 60) + 1, center=True, min_periods=1).mean(), colour, title)
        for key, colour in zip(record.sets_of(measure), cycle(SERIES), strict=False):
            curve(right, *_points(record.history, measure, key, record.history_by), colour,
                  f"student, {record.label_of(key)}", "o")  # fmt: skip
            if record.teacher and is_number(level := record.teacher.score(measure, key)):
                label = plain(f"teacher, {record.label_of(key)}")
                right.axhline(level, color=colour, linestyle="--", linewidth=1.2, label=label)
        _count_axis(right, record.history_by)
        for area in (left, right):
            if len(area.get_legend_handles_labels()[0]) > 1:
                area.legend(loc="upper right", fontsize=7)
