"""The report of a chain: a table of its models (size, speed, every score)."""

import json
from pathlib import Path
from statistics import median

from distill.report.page import Block, Table, table_markdown
from distill.report.words import NONE, number, short
from distill.runs.record import Record
from distill.runtime.files import atomic

FILES = ("chain.md", "chain.json")
NOTE = "With several seeds: the median (lowest to highest). Percentages are relative to the first line."
Column = tuple[str, str]  # title of a measure, name of an evaluation set
Runs = list[Record]  # the records of a stage, one for each seed


def write(path: Path, results: dict[str, list[Runs]], anchors: list[str]) -> str:
    """Write chain.md and chain.json into the folder; return the text of chain.md.

    Args:
        results: of the stages that score each model; the first model is what the others are compared with.
    """
    scores = {model: _scores(stages) for model, stages in results.items()}
    tables = [table_markdown(_table(results, scores))] if results else []
    text = "\n\n".join([*tables, *anchors]) + "\n"
    with atomic(path / "chain.md") as new:
        new.write_text(text, encoding="utf-8")
    models = {model: {", ".join(column): value for column, value in by.items()} for model, by in scores.items()}
    with atomic(path / "chain.json") as new:
        new.write_text(json.dumps({"models": models}, indent=1), encoding="utf-8")
    return text


def blocks(results: dict[str, list[Runs]], anchors: list[str]) -> list[Block]:
    """The results of a chain for an HTML page, with a pointer to the text."""
    table: list[Block] = []
    if results:
        table.append(_table(results, {model: _scores(stages) for model, stages in results.items()}))
    return [*table, *anchors, "chain.md has this table as text."]


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
