"""The scores of a stage's runs by measure and set, and how the tables of a chain show those of several seeds."""

from statistics import median
from typing import Any

from distill.report.page import NONE, number

Column = tuple[str, str]  # title of a measure, name of an evaluation set
Runs = list[dict[str, Any]]  # results.json of the runs of a stage, one for each seed


def scores_of(runs: Runs) -> dict[Column, list[float]]:
    """Every score of the students, of each seed that has it."""
    found: dict[Column, list[float]] = {}
    for measure, described in runs[0]["measures"].items():
        for data in runs[0]["student"].get(measure, {}):
            values = [each["student"][measure].get(data) for each in runs]
            found[described["title"], data_label(runs[0], data)] = [value for value in values if value is not None]
    return found


def data_label(results: dict[str, Any], name: str) -> str:
    """The set, or what it holds where its name would not tell stages apart, such as `dev` of SQuAD and of GLUE."""
    description = str(results["evaluation"].get(name, {}).get("description") or "")
    return description.partition(" of ")[2].partition(";")[0] or name if name == "dev" else name


def cell(values: list[float]) -> str:
    """The median, with the lowest and the highest where there are several."""
    if not values:
        return NONE
    spread = f" ({number(min(values))} to {number(max(values))})" if len(values) > 1 else ""
    return number(median(values)) + spread


def lines_of_table(head: list[str], rows: list[list[str]]) -> str:
    """A Markdown table whose first column is words and whose others are numbers."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
