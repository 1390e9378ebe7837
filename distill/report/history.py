"""The history of a run in tables: losses and scores by epoch or step, the twin's and the teacher's beside them."""

from typing import Any

from distill.report.lookup import axis_of, label_of, measures_of, sets_of, titles_of_terms, value_at
from distill.report.page import NONE, Block, Table, number, short, time_of
from distill.report.plots import Picture

MOST_LINES = 40  # of a history in a table; the figures show all


def history_blocks(results: dict[str, Any], pictures: dict[str, Picture]) -> list[Block]:
    """The tables of a history and its figures, where `pictures` has them; of a run under way what there is so far."""
    axis = axis_of(results)
    all_lines, all_twin = (
        {_point(line, axis): line for line in history or []}
        for history in (results.get("history"), value_at(results, "twin", "history"))
    )
    student, twin = _some(all_lines), _some(all_twin)
    tables = [_losses(results, student, twin)]
    tables += [_measure(results, measure, student, twin) for measure in measures_of(results)]
    shown: list[Block] = [table for table in tables if table.rows]
    if len(student) < len(all_lines):
        shown.insert(0, f"The tables list {len(student)} of {len(all_lines)} points; history.jsonl has all.")
    return shown + [pictures[name] for name in ("history", "minutes") if name in pictures]


def _point(line: dict[str, Any], axis: str) -> str:
    """The key of a line of a history: its step, or its epoch without needless zeros."""
    return number(line.get("step") or 0) if axis == "step" else f"{_epochs(line):.2f}".rstrip("0").rstrip(".")


def _epochs(line: dict[str, Any]) -> float:
    return float(line.get("epoch") or 0)


def _some(lines: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The lines themselves, or every n-th from the last one back where a table of all would be too long."""
    stride = -(-len(lines) // MOST_LINES)
    return {key: line for at, (key, line) in enumerate(lines.items(), 1) if (len(lines) - at) % max(stride, 1) == 0}


def _losses(results: dict[str, Any], student: dict[str, Any], twin: dict[str, Any]) -> Table:
    """Training losses up to each point, with what the twin's terms were beside them."""
    titles = titles_of_terms(results, results.get("twin") or {})
    columns = [
        (term, history)
        for history in (student, twin)
        for term in titles
        if any(value_at(line, "loss", term) is not None for line in history.values())
    ]
    # With one term alone the weighted total is that term again.
    for history in (student, twin):
        terms = [term for term, of in columns if of is history]
        if len(terms) == 2 and terms[0] == "total":
            columns.remove(("total", history))
    by_step = axis_of(results) == "step"
    first = ["Step", "Epochs"] if by_step else ["Epoch", "Steps"]
    head = [*first, "Tokens", "Time", *(titles[term] for term, _ in columns)]
    twin_columns = sum(of is twin for _, of in columns)
    groups = [("", 4), ("Student", len(columns) - twin_columns), ("Twin", twin_columns)] if twin_columns else []
    rows = [
        [
            point,
            f"{_epochs(line):.3g}" if by_step else number(line.get("step")),
            short(line.get("tokens")),
            time_of(line.get("seconds")) or NONE,
            *(number(value_at(of, point, "loss", term)) for term, of in columns),
        ]
        for point, line in student.items()
    ]
    return Table(head, rows if columns else [], title="Training loss", groups=groups)


def _measure(results: dict[str, Any], measure: str, student: dict[str, Any], twin: dict[str, Any]) -> Table:
    """One measure at each point for each evaluation set, student and twin side by side; the teacher's last."""
    histories = [("Student", student), ("Twin", twin)]
    columns = [
        (key, name, history)
        for key in sets_of(results, measure)
        for name, history in histories
        if any(value_at(line, measure, key) is not None for line in history.values())
    ]
    axis = axis_of(results)
    points = {**twin, **student}
    ordered = sorted(points, key=lambda point: float(points[point].get(axis) or 0))
    rows = [[point, *(number(value_at(of, point, measure, key)) for key, _, of in columns)] for point in ordered]
    rows = [row for row in rows if set(row[1:]) - {NONE}]
    if rows and value_at(results, "teacher", measure):
        # Once for each set: the first of its columns.
        keys = [key for key, _, _ in columns]
        cells = [number(value_at(results, "teacher", measure, key)) for key in keys]
        firsts = [keys.index(key) == column for column, key in enumerate(keys)]
        rows.append(["Teacher", *(cell if first else "" for cell, first in zip(cells, firsts, strict=True))])
    labels = [label_of(results, key) for key, _, _ in columns]
    title = measures_of(results)[measure]["title"]
    if not twin:
        return Table([axis.capitalize(), *labels], rows, title=title)
    groups = [("", 1), *((label, labels.count(label)) for label in dict.fromkeys(labels))]
    return Table([axis.capitalize(), *(name for _, name, _ in columns)], rows, title=title, groups=groups)
