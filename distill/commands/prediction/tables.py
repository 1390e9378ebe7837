"""Predictions as a table, by the name of the file: CSV, TSV or Parquet, a row for each and a column for each entry."""

import csv
import json
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any

from distill.data.lines import Record

KINDS = ("csv", "tsv", "parquet")
ROWS = 10_000  # of a Parquet file that are in memory at once
LARGEST = 2**63  # beyond it a number is text in Parquet


class Columns:
    """The columns of outcomes in the order in which they come, and what each holds."""

    def __init__(self) -> None:
        self.types: dict[str, set[type]] = {}

    def add(self, outcome: Record) -> None:
        for name, value in outcome.items():
            types = self.types.setdefault(str(name), set())
            if value is not None:
                large = type(value) is int and not -LARGEST <= value < LARGEST
                types.add(str if large else type(value))

    def number(self, name: str) -> type | None:
        """bool, int or float where a column holds nothing else; None: it is text."""
        types = self.types[name]
        if types in ({bool}, {int}):
            return next(iter(types))
        return float if types and types <= {int, float} else None


def write_table(records: Iterable[Record], columns: Columns, kind: str, path: Path) -> None:
    """Write outcomes as a table, in which lists and dicts such as `probabilities` are JSON.

    Args:
        records: as they come; they are not all in memory.
        columns: of all of them.
        kind: one of `KINDS`.
    """
    if kind == "parquet":
        _write_parquet(records, columns, path)
        return
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, delimiter="\t" if kind == "tsv" else ",", lineterminator="\n")
        writer.writerow(columns.types)
        writer.writerows([_text(record.get(name)) for name in columns.types] for record in records)


def _write_parquet(records: Iterable[Record], columns: Columns, path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    types: dict[type | None, Any] = {
        bool: pyarrow.bool_(),
        int: pyarrow.int64(),
        float: pyarrow.float64(),
        None: pyarrow.string(),
    }
    schema = pyarrow.schema([(name, types[columns.number(name)]) for name in columns.types])
    coming = iter(records)
    with pyarrow.parquet.ParquetWriter(path, schema) as writer:
        while chunk := list(islice(coming, ROWS)):
            values = {
                name: [_value(record.get(name), columns.number(name)) for record in chunk] for name in columns.types
            }
            writer.write_table(pyarrow.table(values, schema=schema))


def _value(value: Any, number: type | None) -> Any:
    return None if value is None else number(value) if number is not None else _text(value)


def _text(value: Any) -> str:
    """A value as a field: a text as it stands, nothing where there is none, all else as JSON."""
    return value if isinstance(value, str) else "" if value is None else json.dumps(value, ensure_ascii=False)
