"""The results of a finished run as an object that shows itself: a table in a shell, the same as HTML in a notebook."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distill.config.teacher import BUNDLED
from distill.models.load import bundled_folder
from distill.report.page import Table, render
from distill.report.summary import comparison, findings
from distill.runs.record import Record
from distill.runtime.errors import Damaged, first_line
from distill.runtime.files import read_yaml
from distill.runtime.jsonl import LogLine, read_lines
from distill.runtime.progress import counted

if TYPE_CHECKING:
    from distill.report.chart import Chart

GAP = "  "  # between two columns of text


@dataclass(frozen=True, repr=False, eq=False)
class RunResults:
    """The results of a run, from its folder.

    Attributes:
        folder: of the run.
        record: all that it has recorded.
    """

    folder: Path
    record: Record

    @property
    def scores(self) -> dict[str, dict[str, dict[str, float | None]]]:
        """By model (teacher, student, baseline), measure and set: `scores["student"]["perplexity"]["books"]`."""
        return {
            name: {measure: dict(model.scores[measure]) for measure in self.record.measures if measure in model.scores}
            for name, model in self.record.models().items()
        }

    @cached_property
    def content(self) -> dict[str, Any]:
        """All of results.json, as a dict."""
        return self.record.to_json()

    @property
    def student(self) -> Path:
        """The folder of the student, for `distill.predict`, `distill.score`, transformers and as a teacher."""
        return self.folder / "student"

    @cached_property
    def teacher(self) -> str | None:
        """The folder or Hub name of the teacher; None for none, for several, or for one of a class of your own."""
        teacher = self.settings.get("teacher") or {}
        kind = teacher.get("kind")
        if kind in BUNDLED:
            return bundled_folder(kind)
        return teacher.get("path") if kind == "pretrained" else None

    @cached_property
    def settings(self) -> dict[str, Any]:
        """All settings of the run, as in config.yaml. Raises Damaged where that cannot be read."""
        file = self.folder / "config.yaml"
        try:
            settings = read_yaml(file) if file.is_file() else {}
        except (OSError, ValueError) as error:
            raise Damaged(file, first_line(error)) from None
        return settings if isinstance(settings, dict) else {}

    @cached_property
    def metrics(self) -> list[LogLine]:
        """One dict for each logged step: losses by term as `loss/NAME`, lr, grad_norm, tokens_per_second and others."""
        return read_lines(self.folder / "metrics.jsonl")

    @property
    def history(self) -> list[LogLine]:
        """One dict for each evaluation in the course of the training."""
        return list(self.content["history"])

    @property
    def report(self) -> Path:
        """The page with tables, curves and settings."""
        return self.folder / "report.html"

    def plot(self) -> "Chart":
        """Losses by step, and the first measure by evaluation beside its teacher's value, as a matplotlib figure."""
        from distill.report.chart import chart

        return chart(self.record, self.metrics)

    def __repr__(self) -> str:
        return "\n".join([self._title, *_as_text(comparison(self.record)), f"Report: {self.report}"])

    def _repr_html_(self) -> str:
        """For notebooks."""
        table, sentences = comparison(self.record), findings(self.record) if self.record.student else ""
        return render("results.html", title=self._title, findings=sentences, table=table, report=self.report)

    @property
    def _title(self) -> str:
        steps = self.record.training.steps
        after = "" if steps is None else f" after {counted(steps, 'step')}"
        return f"{self.record.recipe or 'run'} in {self.folder}{after}"


def _as_text(table: Table) -> list[str]:
    """The lines of a table: the first column on the left, numbers on the right."""
    rows = [table.head, *table.rows]
    columns = max(len(row) for row in rows)
    full = [row for row in rows if len(row) == columns]
    widths = [max(len(row[number]) for row in full) for number in range(columns)]
    widths[0] = max(widths[0], *(len(row[0]) for row in rows))
    return [
        GAP.join(
            [row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=False))]
        ).rstrip()
        for row in rows
    ]
