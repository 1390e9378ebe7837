"""What the figures of a run show: losses and optimizer by step, throughput, models side by side, scores on the way."""

import math
from collections.abc import Iterable
from dataclasses import replace
from itertools import cycle
from pathlib import Path

from distill.report.figures import INK, MODELS, SERIES, DotPanel, Line, Panel, Sheet, picture
from distill.report.page import Picture
from distill.report.words import count_of, is_number
from distill.runs.facts import HistoryPoint, LearningCurve, Teacher
from distill.runs.record import Record, term_titles
from distill.runtime.jsonl import LogLine

Metrics = list[LogLine]  # the lines of metrics.jsonl: numbers by name
MINUTES = "minutes of training"
GIB = 2**30
TITLES = {"lr": "Learning rate", "grad_norm": "Gradient norm, before clipping", "loss_scale": "Loss scale"}
# Panels of a machine: their titles, and by label the name of a sample with what it is multiplied by.
MACHINE: dict[str, dict[str, tuple[str, float]]] = {
    "Cores in use": {"rank 0": ("process_cpu", 1)},
    "CPU, fraction of the host": {"busy": ("machine_cpu", 1)},
    "Memory, GiB": {"rank 0": ("process_memory", 1 / GIB), "free": ("memory_free", 1 / GIB)},
    "Network, MB/s": {"sent": ("network_sent", 1e-6), "received": ("network_received", 1e-6)},
    "GPU, fraction of the time": {"busy": ("gpu_busy", 1)},
    "GPU memory, GiB": {"used": ("gpu_memory", 1 / GIB)},
}


def draw(folder: Path, record: Record, metrics: Metrics) -> dict[str, Picture]:
    """Draw what there are numbers for into `folder`/plots; keys: comparison, history, minutes, loss, optimizer,
    throughput."""
    sheets = {
        "comparison": comparison(record),
        "history": history(record),
        "minutes": minutes(record),
        "loss": losses(record, metrics),
        "optimizer": optimizer(metrics),
        "throughput": speed(metrics),
    }
    return {name: picture(folder, name, sheet) for name, sheet in sheets.items() if sheet is not None}


def losses(record: Record, metrics: Metrics) -> Sheet | None:
    panels = loss_panels(record, metrics)
    caption = "Training loss by step: each logged value faintly, their moving average on top."
    caption += " Dotted lines: skipped steps, not finite." if panels and panels[0].marks else ""
    return Sheet(panels, caption, min(2, len(panels))) if panels else None


def optimizer(metrics: Metrics) -> Sheet | None:
    panels = optimizer_panels(metrics)
    caption = f"{', '.join(panel.title for panel in panels).capitalize()}, by step."
    return Sheet(panels, caption, len(panels)) if panels else None


def speed(metrics: Metrics) -> Sheet | None:
    panel = throughput(metrics)
    return Sheet([panel], "Training throughput over time.") if panel else None


def points_of(lines: Iterable[LogLine], x: str, y: str) -> tuple[list[float], list[float]]:
    """The values of two names in the lines where there are both."""
    pairs = [(line[x], line[y]) for line in lines if is_number(line.get(x)) and is_number(line.get(y))]
    return [a for a, _ in pairs], [b for _, b in pairs]


def loss_panels(record: Record, metrics: Metrics, prefix: str = "") -> list[Panel]:
    """A panel for each loss term, the weighted total first; with one term alone the total is that term again."""
    titles = term_titles(record)
    for line in metrics:
        titles |= {key[5:]: key[5:] for key in line if key.startswith("loss/") and key[5:] not in titles}
    titles["total"] = "Total (weighted sum)"
    colours = {"total": INK} | dict(zip((name for name in titles if name != "total"), cycle(SERIES), strict=False))
    curves = {name: points_of(metrics, "step", f"loss/{name}") for name in titles}
    shown = [name for name, (x, _) in curves.items() if x]
    shown = shown[1:] if len(shown) == 2 and shown[0] == "total" else shown
    marks = skipped_steps(metrics)
    return [
        Panel(f"{prefix}{titles[name]}", "step", [Line(*curves[name], colours[name], smooth=True)], marks=marks)
        for name in shown
    ]


def skipped_steps(metrics: Metrics) -> list[float]:
    """Logged steps before which steps were skipped: those at which their running count has grown."""
    x, counts = points_of(metrics, "step", "skipped")
    return [step for step, count, before in zip(x, counts, [0.0, *counts], strict=False) if count > before]


def optimizer_panels(metrics: Metrics) -> list[Panel]:
    rate, norm, scale = ((title, points_of(metrics, "step", name)) for name, title in TITLES.items())
    panels = [
        Panel(rate[0], "step", [Line(*rate[1], SERIES[0])], from_zero=True, form="{x:g}"),
        Panel(norm[0], "step", [Line(*norm[1], SERIES[1], smooth=True)]),
        Panel(scale[0], "step", [Line(*scale[1], SERIES[2], steps=True)]),
    ]
    return [panel for panel in panels if panel.lines[0].x]


def throughput(metrics: Metrics) -> Panel | None:
    x, y = points_of(metrics, "seconds", "tokens_per_second")
    if not x:
        return None
    line = Line([seconds / 60 for seconds in x], y, MODELS["student"], smooth=True)
    top = 1.15 * sorted(y)[math.ceil(0.98 * len(y)) - 1]  # a few that are far above all others are cut
    title, form = "Training tokens per second", "{x:,.0f}"
    return Panel(title, MINUTES, [line], from_zero=True, top=top or None, form=form)


def comparison(record: Record) -> Sheet | None:
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
    panels = []
    for measure in shown:
        series = {
            name: (MODELS[name], marker, {sets.index(key): value for key, value in by_set.items()})
            for (name, by_set), marker in zip(values[measure].items(), "sod", strict=False)
        }
        better = "lower" if record.measures[measure].lower_is_better else "higher"
        title = f"{record.measures[measure].title} ({better} is better)"
        panels.append(DotPanel(title, [record.label_of(key) for key in sets], series))
    baseline = " and from the same student trained without one." if "baseline" in models else "."
    caption = f"How far the student is from its teacher{baseline}"
    return Sheet(panels, caption, len(panels), 0.85 + 0.42 * len(sets), "below")


def history(record: Record) -> Sheet | None:
    """Every measure on every set by epoch or step."""
    keys = [
        (measure, key)
        for measure in record.measures
        for key in dict.fromkeys(key for point in record.history for key in point.scores.get(measure, {}))
    ]
    if not keys or len(record.history) < 2:
        return None
    panels = [_scores_panel(record, measure, key, record.history_by) for measure, key in keys]
    measured = " and ".join(dict.fromkeys(record.measures[measure].title.lower() for measure, _ in keys)).capitalize()
    caption = f"{measured} {'by step' if record.history_by == 'step' else 'after each epoch'}."
    caption += " Dotted line: the student that was kept." if panels[0].marks else ""
    sets = len([measure for measure, _ in keys if measure == keys[0][0]])
    return Sheet(panels, caption, min(3, sets if sets > 1 else len(panels)), legend="below")


def minutes(record: Record) -> Sheet | None:
    """The first measure over the minutes of training, a panel for each set: how long for how good."""
    record, remark = _with_curve(record)
    measure, described = record.first_measure
    keys = list(dict.fromkeys(key for point in record.history for key in point.scores.get(measure, {})))
    if not keys or len([point for point in record.history if is_number(point.seconds)]) < 2:
        return None
    panels = [_scores_panel(record, measure, key, MINUTES) for key in keys]
    title = described.title.lower().capitalize()
    caption = f"{title} over the minutes of training, evaluation left out{remark}."
    return Sheet(panels, caption, min(3, len(panels)), legend="below")


def _scores_panel(record: Record, measure: str, key: str, axis: str) -> Panel:
    """The scores of student and baseline on a set, and the teacher's level."""
    baseline = record.baseline.history if record.baseline else []
    lines = []
    for (name, points), marker in zip({"student": record.history, "baseline": baseline}.items(), "od", strict=True):
        score_points = [{"x": _place(point, axis), "y": point.score(measure, key)} for point in points]
        lines.append(Line(*points_of(score_points, "x", "y"), MODELS[name], name, marker=marker))
    level = record.teacher.score(measure, key) if record.teacher else None
    if is_number(level):
        lines.append(Line([], [], MODELS["teacher"], "teacher", level=level))
    title = f"{record.label_of(key)}\n{record.measures[measure].title.lower()}"
    kept = record.best.step if record.best else None
    places = [_place(point, axis) for point in record.history if kept is not None and point.step == kept]
    marks = [place for place in places if place is not None]
    shown = [line for line in lines if line.x or line.level is not None]
    return Panel(title, axis, shown, marks=marks, whole=axis != MINUTES)


def _place(point: HistoryPoint, axis: str) -> float | None:
    if axis == MINUTES:
        return point.seconds / 60 if is_number(point.seconds) else None
    return point.step if axis == "step" else point.epoch


def _with_curve(record: Record) -> tuple[Record, str]:
    """The record with the scores on a few sequences as its history, and a remark, where a run has these."""
    curve = record.curve
    if curve is None or len(curve.student) < 2:
        return record, ""
    measure, key = curve.measure, curve.data

    def history(curve: LearningCurve | None) -> list[HistoryPoint]:
        points = curve.student if curve else []
        return [HistoryPoint(None, p.step, p.tokens, p.seconds, {}, {measure: {key: p.score}}) for p in points]

    other = record.baseline.curve if record.baseline else None
    same = other is not None and (other.measure, other.data, other.sequences) == (measure, key, curve.sequences)
    baseline = record.baseline and replace(record.baseline, history=history(other if same else None))
    teacher = Teacher(scores={measure: {key: curve.teacher}})
    shown = replace(record, history=history(curve), teacher=teacher, baseline=baseline)
    return shown, f"; on {count_of(curve.sequences, 'sequence')}, so that scoring is cheap"


def machine_panels(samples: dict[str, list[float]], seconds: list[float], axis: str) -> list[Panel]:
    """Processors, memory, network and GPU over time.

    Args:
        samples: by name, as `distill.runs.profile.sampler` gives them.
        seconds: where they are on the axis.
    """
    panels = []
    for title, curves in MACHINE.items():
        present = {label: (name, scale) for label, (name, scale) in curves.items() if name in samples}
        lines = [
            Line(seconds, [scale * value for value in samples[name]], colour, label)
            for colour, (label, (name, scale)) in zip(SERIES, present.items(), strict=False)
        ]
        panels += [Panel(title, axis, lines, from_zero=True)] if lines else []
    return panels
