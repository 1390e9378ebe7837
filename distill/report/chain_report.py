"""The report of a chain: a table of its models (size, speed, every score), and their scores by snapshot."""

import json
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from statistics import median
from textwrap import wrap

from distill.report.figures import SERIES, Line, Panel, Sheet, picture
from distill.report.page import Block, Table, table_markdown
from distill.report.words import NONE, is_number, number, short
from distill.runs.record import Record
from distill.runtime.files import atomic

FILES = ("chain.md", "chain.json")
NOTE = "With several seeds: the median (lowest to highest). Percentages are relative to the first line."
Column = tuple[str, str]  # title of a measure, name of an evaluation set
Runs = list[Record]  # the records of a stage, one for each seed
Curves = dict[Column, dict[int, list[float]]]  # by title: the values at each step


@dataclass
class SnapshotRuns:
    """A stage that keeps snapshots, and what was run from them.

    Attributes:
        record: of the stage.
        stages: by name of the stages that were run from its snapshots: their runs, by the step of the snapshot.
    """

    record: Record
    stages: dict[str, dict[int, Runs]] = field(default_factory=dict)


def write(path: Path, results: dict[str, list[Runs]], snapshots: dict[str, SnapshotRuns], anchors: list[str]) -> str:
    """Write chain.md, chain.json and the figures into the folder; return the text of chain.md.

    Args:
        results: of the stages that score each model; the first model is what the others are compared with.
        snapshots: what was run from the snapshots of a stage, by its name.
    """
    scores = {model: _scores(stages) for model, stages in results.items()}
    curves = {stage: curves_of(stage, runs) for stage, runs in snapshots.items()}
    tables = [table_markdown(_table(results, scores))] if results else []
    sections = [section(path, stage, snapshots[stage], drawn) for stage, drawn in curves.items()]
    text = "\n\n".join([*tables, *sections, *anchors]) + "\n"
    with atomic(path / "chain.md") as new:
        new.write_text(text, encoding="utf-8")
    content = {
        "models": {model: {", ".join(column): value for column, value in by.items()} for model, by in scores.items()},
        "snapshots": {stage: {": ".join(curve): value for curve, value in by.items()} for stage, by in curves.items()},
    }
    with atomic(path / "chain.json") as new:
        new.write_text(json.dumps(content, indent=1), encoding="utf-8")
    return text


def blocks(results: dict[str, list[Runs]], anchors: list[str]) -> list[Block]:
    """The results of a chain for an HTML page, with a pointer to the scores by snapshot."""
    table: list[Block] = []
    if results:
        table.append(_table(results, {model: _scores(stages) for model, stages in results.items()}))
    return [*table, *anchors, "chain.md has this table as text, and the scores by snapshot where stages keep some."]


def _table(results: dict[str, list[Runs]], scores: dict[str, dict[Column, list[float]]]) -> Table:
    """A line for each model, beside the first one."""
    columns = list(dict.fromkeys(column for by_column in scores.values() for column in by_column))
    first = next(iter(scores.values()))
    table = Table(["", "parameters", "tokens/s", *(", ".join(column) for column in columns)], note=NOTE)
    for model, by_column in scores.items():
        student = results[model][0][0].student
        assert student is not None  # of a finished run
        cells = [model, short(student.parameters), number(student.tokens_per_second)]
        table.rows.append([*cells, *(_compared(by_column.get(column), first.get(column)) for column in columns)])
    return table


def _scores(stages: list[Runs]) -> dict[Column, list[float]]:
    """Every score of a model, of each seed; of a measure and set that several stages have, those of the last one."""
    return {column: values for runs in stages for column, values in scores_of(runs).items()}


def scores_of(runs: Runs) -> dict[Column, list[float]]:
    """Every score of the students, of each seed that has it."""
    scores: dict[Column, list[float]] = {}
    for name, measure in runs[0].measures.items():
        for data in runs[0].student.scores.get(name, {}) if runs[0].student else {}:
            values = [run.student.score(name, data) for run in runs if run.student]
            scores[measure.title, data_label(runs[0], data)] = [value for value in values if value is not None]
    return scores


def data_label(record: Record, name: str) -> str:
    """The set's name, or what it holds where stages share the name, such as `dev` of SQuAD and of GLUE."""
    description = (record.evaluation[name].description if name in record.evaluation else "") or ""
    return description.partition(" of ")[2].partition(";")[0] or name if name == "dev" else name


def _compared(values: list[float] | None, reference: list[float] | None) -> str:
    text = cell(values or [])
    if values and reference and values is not reference and (base := median(reference)):
        text += f", {median(values) / base:.0%}"
    return text


def cell(values: list[float]) -> str:
    """The median, with the lowest and the highest where there are several."""
    if not values:
        return NONE
    spread = f" ({number(min(values))} to {number(max(values))})" if len(values) > 1 else ""
    return number(median(values)) + spread


def curves_of(stage: str, runs: SnapshotRuns) -> Curves:
    """Every score at the snapshots of a stage, by the name of what has it and its measure with the set.

    The stage itself has one value where it was evaluated after that step, the stages run from there one for each seed.
    """
    record, curves = runs.record, Curves()
    for point in record.history:
        if point.step is not None and point.step in record.snapshots:
            for name, measure in record.measures.items():
                for data, value in point.scores.get(name, {}).items():
                    if is_number(value):
                        curve = stage, f"{measure.title}, {data_label(record, data)}"
                        curves.setdefault(curve, {})[point.step] = [value]
    for name, by_step in runs.stages.items():
        for step, of_step in by_step.items():
            for column, values in scores_of(of_step).items():
                if values:
                    curves.setdefault((name, ", ".join(column)), {})[step] = values
    return curves


def section(path: Path, stage: str, runs: SnapshotRuns, curves: Curves) -> str:
    """The part of chain.md on the snapshots of a stage: a table, and the figure, which is drawn into `path`/plots."""
    steps = runs.record.snapshots
    head = ["step", *(": ".join(curve) for curve in curves)]
    rows = [[f"{step:,}", *(cell(values.get(step, [])) for values in curves.values())] for step in steps]
    note = f"Snapshots of {stage}, by step. With several seeds: the median (lowest to highest)."
    scored = {step for (name, _), values in curves.items() if name == stage for step in values}
    if missing := [f"{step:,}" for step in steps if step not in scored]:
        note += f" {stage} was not evaluated after step {', '.join(missing)}: see evaluate.every_steps."
    parts = [table_markdown(Table(head, rows, note))]
    if curves:
        panels = panels_by_step(curves)
        sheet = Sheet(panels, f"Scores by step of {stage}", min(3, len(panels)), 2.0)
        drawn = picture(path, f"snapshots_{stage}", sheet)
        parts.append(f"![{drawn.caption}]({drawn.file})")
    return "\n\n".join(parts)


def panels_by_step(curves: Curves) -> list[Panel]:
    """A panel for each curve: the medians of its values by step, and the ranges from the lowest to the highest.

    Each part of a title begins a line; curves with the same first part have one colour.
    """
    steps = [step for values in curves.values() for step in values]
    margin = 0.05 * (max(steps) - min(steps)) or 1
    ends = min(steps) - margin, max(steps) + margin
    colours = dict(zip(dict.fromkeys(first for first, _ in curves), cycle(SERIES), strict=False))
    panels = []
    for title, values in curves.items():
        x = sorted(values)
        spread = [(min(values[step]), max(values[step])) for step in x]
        line = Line(list(x), [median(values[step]) for step in x], colours[title[0]], marker="o", spread=spread)
        name = "\n".join(part for part_of_title in title for part in wrap(part_of_title, 34))
        panels.append(Panel(name, "step", [line], whole=True, ends=ends))
    return panels
