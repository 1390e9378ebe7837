"""The curves of a run as one matplotlib figure, which a notebook shows without any set-up."""

import io
from typing import Any

from matplotlib.figure import Figure

from distill.report.lookup import axis_of, label_of, measures_of, sets_of, titles_of_terms, usable, value_at
from distill.report.plots import smoothed

WIDTH, HEIGHT = 9.0, 3.2  # inches
SPAN = 60  # the moving average goes over one part of so many of a curve to either side


class Chart(Figure):
    """A figure that belongs to no window of pyplot's, and is drawn where a notebook shows its last value."""

    def __init__(self) -> None:
        super().__init__(figsize=(WIDTH, HEIGHT), layout="constrained")

    def _repr_png_(self) -> bytes:
        picture = io.BytesIO()
        self.savefig(picture, format="png", dpi=80, facecolor="white")
        return picture.getvalue()


def draw(chart: Chart, results: dict[str, Any], metrics: list[dict[str, Any]]) -> Chart:
    """Losses by step on the left; on the right the first measure of the student on every set, by epoch or step."""
    losses, scores = chart.subplots(1, 2)
    titles = titles_of_terms(results)
    for name, title in titles.items():
        points = [(line["step"], line[f"loss/{name}"]) for line in metrics if usable(line.get(f"loss/{name}"))]
        if points:
            steps, values = [step for step, _ in points], [value for _, value in points]
            losses.plot(steps, smoothed(values, len(values) // SPAN), label=title)
    losses.set(xlabel="step", title="Loss")
    measure, described = next(iter(measures_of(results).items()))
    axis = axis_of(results)
    for number, key in enumerate(sets_of(results, measure)):
        colour = f"C{number % 10}"
        lines = [line for line in results.get("history") or [] if usable(value_at(line, measure, key))]
        scores.plot(
            [line[axis] for line in lines], [line[measure][key] for line in lines], color=colour, marker="o",
            label=f"student, {label_of(results, key)}",
        )  # fmt: skip
        if usable(teacher := value_at(results, "teacher", measure, key)):
            scores.axhline(teacher, color=colour, linestyle="--", label=f"teacher, {label_of(results, key)}")
    scores.set(xlabel=axis, title=str(described["title"]))
    for axes in (losses, scores):
        axes.spines[["top", "right"]].set_visible(False)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(frameon=False, fontsize="small")
    return chart
