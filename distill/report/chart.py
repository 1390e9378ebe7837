"""The curves of a run as one matplotlib figure, which a notebook shows without any set-up."""

import io
from collections.abc import Sequence

from matplotlib.figure import Figure

from distill.report import figures
from distill.runs.record import Record
from distill.runtime.jsonl import LogLine


class Chart(Figure):
    """A figure that belongs to no window of pyplot's, and is drawn where a notebook shows its last value."""

    def _repr_png_(self) -> bytes:
        picture = io.BytesIO()
        self.savefig(picture, format="png", dpi=100, facecolor="white")
        return picture.getvalue()


def chart(record: Record, metrics: Sequence[LogLine]) -> Chart:
    """Losses by step on the left; on the right the first measure of the student on every set, by epoch or step."""
    made = Chart(figsize=(9.0, 3.2), layout="constrained")
    figures.chart(record, metrics, made)
    return made
