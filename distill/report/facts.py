"""Facts in two columns, and the rows of a step in words, for the report and the model card."""

from typing import Any

from distill.report.page import NONE, Block, Table, number


def facts_table(title: str, facts: list[tuple[str, Any]]) -> list[Block]:
    """A table of labels and values, without those that are not known; nothing where none is left."""
    rows = [[label, str(value)] for label, value in facts if value not in (None, "", NONE)]
    return [Table(["", ""], rows, title=title, text=True)] if rows else []


def rows_of_step(backend: dict[str, Any]) -> str | None:
    """How many rows a step has, and how they are made up; None where `backend` of results.json does not say."""
    rows, accumulate, ranks = (backend.get(key) for key in ("batch_size", "accumulate", "ranks"))
    if rows is None or accumulate is None or ranks is None:
        return None
    in_all = backend.get("rows_per_step", rows * accumulate * ranks)  # results of older releases have none
    return f"{number(in_all)} ({rows} in a micro-batch, {accumulate} accumulated, {ranks} rank(s))"
