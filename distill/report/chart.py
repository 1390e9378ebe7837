"""The curves of a run as one matplotlib figure, which a notebook shows without any set-up."""

import io
from itertools import cycle

from matplotlib.figure import Figure

from distill.report.figures import INK, SERIES, Line, Panel, Sheet, draw, smoothed
from distill.report.run_figures import Metrics, points_of
from distill.report.words import is_number
from distill.runs.record import Record, term_titles

SPAN = 60  # the moving average goes over one part of so many of a curve to either side


class Chart(Figure):
    """A figure that belongs to no window of pyplot's, and is drawn where a notebook shows its last value."""

    def __init__(self) -> None:
        super().__init__(figsize=(9.0, 3.2), layout="constrained")

    def _repr_png_(self) -> bytes:
        picture = io.BytesIO()
        self.savefig(picture, format="png", dpi=100, facecolor="white")
        return picture.getvalue()


def chart(record: Record, metrics: Metrics) -> Chart:
    """Losses by step on the left; on the right the first measure of the student on every set, by epoch or step."""
    made = Chart()
    draw(Sheet([_losses(record, metrics), _scores(record)], "", 2, 3.2, "inside"), made)
    return made


def _losses(record: Record, metrics: Metrics) -> Panel:
    lines = []
    for (name, title), colour in zip(term_titles(record).items(), cycle([INK, *SERIES]), strict=False):
        x, y = points_of(metrics, "step", f"loss/{name}")
        lines += [Line(x, smoothed(y, len(y) // SPAN), colour, title)] if x else []
    return Panel("Loss", "step", lines)


def _scores(record: Record) -> Panel:
    measure, described = record.first_measure
    axis, lines = record.history_by, list[Line]()
    for key, colour in zip(record.sets_of(measure), cycle(SERIES), strict=False):
        points = [point for point in record.history if is_number(point.score(measure, key))]
        progress = [float((point.step if axis == "step" else point.epoch) or 0) for point in points]
        scores = [float(point.score(measure, key) or 0) for point in points]
        label = record.label_of(key)
        lines.append(Line(progress, scores, colour, f"student, {label}", marker="o"))
        if record.teacher and is_number(level := record.teacher.score(measure, key)):
            lines.append(Line([], [], colour, f"teacher, {label}", level=level))
    return Panel(described.title, axis, lines, whole=True)
