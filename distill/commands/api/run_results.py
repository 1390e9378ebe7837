"""The results of a finished run as an object that shows itself: a table in a shell, the same as HTML in a notebook."""

from dataclasses import dataclass, field
from functools import cached_property
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from distill.config.teacher import EMBEDDED
from distill.models.teacher import embedded_folder
from distill.report.lookup import measures_of, models_of, value_at
from distill.report.page import Table
from distill.report.summary import comparison, findings
from distill.runtime.jsonl import read_lines

if TYPE_CHECKING:
    from distill.commands.api.chart import Chart

GAP = "  "  # between two columns of text


@dataclass(frozen=True, repr=False, eq=False)
class RunResults:
    """What a run has left in its folder.

    Attributes:
        folder: of the run.
        content: all of results.json, as a dict.
    """

    folder: Path
    content: dict[str, Any] = field(default_factory=dict)

    @property
    def scores(self) -> dict[str, dict[str, dict[str, float]]]:
        """By model (teacher, student, twin), measure and evaluation set; `scores["student"]["perplexity"]["books"]`."""
        return {
            model: {
                measure: dict(self.content[model][measure])
                for measure in measures_of(self.content)
                if self.content[model].get(measure)
            }
            for model in models_of(self.content)
        }

    @property
    def student(self) -> Path:
        """The folder of the student, for `distill.predict`, `distill.score`, transformers and as a teacher."""
        return self.folder / "student"

    @cached_property
    def teacher(self) -> str | None:
        """The folder or Hub name of the teacher; None for none, for several, or for one of a class of your own."""
        given = self.settings.get("teacher") or {}
        if given.get("kind") in EMBEDDED:
            return embedded_folder(given["kind"])
        return given.get("path") if given.get("kind") == "pretrained" else None

    @cached_property
    def settings(self) -> dict[str, Any]:
        """All settings of the run, as in config.yaml."""
        file = self.folder / "config.yaml"
        found = yaml.safe_load(file.read_text("utf-8")) if file.is_file() else {}
        return found if isinstance(found, dict) else {}

    @cached_property
    def metrics(self) -> list[dict[str, Any]]:
        """One dict for each logged step: losses by term as `loss/NAME`, lr, grad_norm, tokens_per_second and others."""
        return read_lines(self.folder / "metrics.jsonl")

    @property
    def history(self) -> list[dict[str, Any]]:
        """One dict for each evaluation in the course of the training."""
        return list(self.content.get("history") or [])

    @property
    def report(self) -> Path:
        """The page with tables, curves and settings."""
        return self.folder / "report.html"

    def plot(self) -> "Chart":
        """Losses by step, and the first measure by evaluation beside its teacher's value, as a matplotlib figure."""
        from distill.commands.api.chart import Chart, draw

        return draw(Chart(), self.content, self.metrics)

    def __repr__(self) -> str:
        return "\n".join([self._title, *_as_text(comparison(self.content)), f"Report: {self.report}"])

    def _repr_html_(self) -> str:
        """For notebooks."""
        sentences = escape(findings(self.content)) if value_at(self.content, "student") else ""
        table = _as_html(comparison(self.content))
        return (
            f"<div><p><b>{escape(self._title)}</b><br>{sentences}</p>{table}"
            f"<p>Report: <code>{escape(str(self.report))}</code></p></div>"
        )

    @property
    def _title(self) -> str:
        steps = value_at(self.content, "training", "steps")
        after = f" after {steps:,} steps" if isinstance(steps, int) else ""
        return f"{self.content.get('recipe') or 'run'} in {self.folder}{after}"


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


def _as_html(table: Table) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in table.head)
    body = []
    for row in table.rows:
        if len(row) == 1 < len(table.head):  # a heading inside the table
            body.append(f'<tr><th colspan="{len(table.head)}" style="text-align:left">{escape(row[0])}</th></tr>')
        else:
            first, *others = (escape(cell) for cell in row)
            cells = "".join(f"<td>{cell}</td>" for cell in others)
            body.append(f'<tr><td style="text-align:left">{first}</td>{cells}</tr>')
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table>"
