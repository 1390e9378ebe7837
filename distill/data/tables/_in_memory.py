"""Rows of a `datasets.Dataset` that a program holds, as labelled examples."""

from dataclasses import dataclass
from typing import Any

from distill.data.tables import TableConfig
from distill.data.tables.table import Table


@dataclass
class RowsConfig(TableConfig):
    """The place of rows in memory; `hub` is what names them in messages."""

    held: Any = None  # a datasets.Dataset

    def rows(self, setting: str) -> Any:
        return self.held


@dataclass
class TableInMemory(Table):
    """A table in memory."""

    held: Any = None

    @property
    def where(self) -> TableConfig:
        return RowsConfig(None, self.hub, None, self.split, self.held)
