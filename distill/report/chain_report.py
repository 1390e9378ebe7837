"""What a chain ends with: a table of its models (size, speed, every score), and their scores by milestone."""

import json
from pathlib import Path
from statistics import median

from distill.report.by_milestone import MilestoneRuns, curves_of, section
from distill.report.page import Block, Table, number, short
from distill.report.stage_scores import Column, Runs, cell, lines_of_table, scores_of
from distill.runtime.files import atomic

NOTE = "Of several seeds the median with the lowest and the highest; in per cent, the share of the first line's."


def write(path: Path, results: dict[str, list[Runs]], milestones: dict[str, MilestoneRuns], anchors: list[str]) -> str:
    """Write chain.md, chain.json and the figures into the folder, and give the text of the first.

    Args:
        results: of the stages that score each model; the first model is what the others are compared with.
        milestones: what was run from the milestones of a stage, by its name.
    """
    scores = {model: _scores(stages) for model, stages in results.items()}
    curves = {stage: curves_of(stage, runs) for stage, runs in milestones.items()}
    tables = [lines_of_table(*_table(results, scores)), NOTE] if results else []
    sections = [section(path, stage, milestones[stage], found) for stage, found in curves.items()]
    text = "\n\n".join([*tables, *sections, *anchors]) + "\n"
    with atomic(path / "chain.md") as new:
        new.write_text(text, encoding="utf-8")
    content = {
        "models": {model: {", ".join(column): of for column, of in found.items()} for model, found in scores.items()},
        "milestones": {stage: {": ".join(curve): of for curve, of in found.items()} for stage, found in curves.items()},
    }
    with atomic(path / "chain.json") as new:
        new.write_text(json.dumps(content, indent=1), encoding="utf-8")
    return text


def blocks(results: dict[str, list[Runs]], anchors: list[str]) -> list[Block]:
    """The same for an HTML page, which says where the scores by milestone are."""
    head, rows = _table(results, {model: _scores(stages) for model, stages in results.items()}) if results else ([], [])
    table: list[Block] = [Table(head, rows, NOTE)] if rows else []
    return [*table, *anchors, "chain.md has this table as text, and the scores by milestone where stages keep some."]


def _table(
    results: dict[str, list[Runs]], scores: dict[str, dict[Column, list[float]]]
) -> tuple[list[str], list[list[str]]]:
    """The head and the rows: a line for each model, beside the first one."""
    columns = list(dict.fromkeys(column for found in scores.values() for column in found))
    first = next(iter(scores.values()))
    head = ["", "parameters", "tokens/s", *(f"{title}, {data}" for title, data in columns)]
    rows = []
    for model, found in scores.items():
        student = results[model][0][0]["student"]
        cells = [model, short(student["parameters"]), number(student["tokens_per_second"])]
        rows.append([*cells, *(_compared(found.get(column), first.get(column)) for column in columns)])
    return head, rows


def _scores(stages: list[Runs]) -> dict[Column, list[float]]:
    """Every score of a model, of each seed; of a measure and set that several stages have, those of the last one."""
    return {column: values for runs in stages for column, values in scores_of(runs).items()}


def _compared(values: list[float] | None, reference: list[float] | None) -> str:
    text = cell(values or [])
    if values and reference and values is not reference and (base := median(reference)):
        text += f", {median(values) / base:.0%}"
    return text
