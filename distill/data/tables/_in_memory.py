"""Rows of a `datasets.Dataset` that a program holds, as labelled examples."""

from dataclasses import dataclass
from typing import Any

from distill.data.tables import RowsConfig, TableConfig
from distill.data.tables.table import Table


@dataclass
class TableInMemory(Table):
    """A table in memory."""

    held: Any = None

    @property
    def where(self) -> TableConfig:
        return RowsConfig(None, self.hub, None, self.split, self.held)
