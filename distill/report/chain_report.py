"""The table at the end of a chain: size, speed and every score of its models, each as a share of the first one's."""

import json
from pathlib import Path
from statistics import median
from typing import Any

from distill.files import atomic
from distill.report.page import NONE, number, short

Column = tuple[str, str]  # title of a measure, name of an evaluation set
Runs = list[dict[str, Any]]  # results.json of the runs of a stage, one for each seed


def write(path: Path, results: dict[str, list[Runs]], anchors: list[str]) -> str:
    """Write chain.md and chain.json into the folder, and give the text of the former.

    Args:
        results: of the stages that score each model; the first model is what the others are compared with.
    """
    scores = {model: _scores(stages) for model, stages in results.items()}
    columns = list(dict.fromkeys(column for found in scores.values() for column in found))
    first = next(iter(scores.values()), {})
    head = ["", "parameters", "tokens/s", *(f"{title}, {data}" for title, data in columns)]
    lines = [head, ["---", *["---:"] * (len(head) - 1)]]
    for model, found in scores.items():
        student = results[model][0][0]["student"]
        cells = [model, short(student["parameters"]), number(student["tokens_per_second"])]
        lines.append([*cells, *(_cell(found.get(column), first.get(column)) for column in columns)])
    table = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
    note = "Of several seeds the median with the lowest and the highest; in per cent, the share of the first line's."
    text = "\n\n".join([table, note, *anchors]) + "\n"
    with atomic(path / "chain.md") as new:
        new.write_text(text, encoding="utf-8")
    content = {
        model: {", ".join(column): values for column, values in found.items()} for model, found in scores.items()
    }
    with atomic(path / "chain.json") as new:
        new.write_text(json.dumps(content, indent=1), encoding="utf-8")
    return text


def _scores(stages: list[Runs]) -> dict[Column, list[float]]:
    """Every score of a model, of each seed; of a measure and set that several stages have, those of the last one."""
    found: dict[Column, list[float]] = {}
    for runs in stages:
        for measure, described in runs[0]["measures"].items():
            for data in runs[0]["student"].get(measure, {}):
                values = [each["student"][measure].get(data) for each in runs]
                found[described["title"], data_label(runs[0], data)] = [value for value in values if value is not None]
    return found


def data_label(results: dict[str, Any], name: str) -> str:
    """The set, or what it holds where its name would not tell stages apart, such as `dev` of SQuAD and of GLUE."""
    description = str(results["evaluation"].get(name, {}).get("description") or "")
    return description.partition(" of ")[2].partition(";")[0] or name if name == "dev" else name


def _cell(values: list[float] | None, reference: list[float] | None) -> str:
    if not values:
        return NONE
    middle = median(values)
    text = number(middle)
    if len(values) > 1:
        text += f" ({number(min(values))} to {number(max(values))})"
    if reference and values is not reference and (base := median(reference)):
        text += f", {middle / base:.0%}"
    return text
