"""Rows of a `datasets.Dataset` that a program holds, as labelled examples."""

from dataclasses import dataclass
from typing import Any

from distill.data.tables import LabelledTexts, TableConfig
from distill.data.tables.table import Table, read


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

    def read(self, setting: str, training: bool, like: Any | None = None) -> LabelledTexts:
        """As of every table, but that classes which the data set numbers keep their numbers."""
        names = getattr(self.held.features.get(self.label), "names", None)
        classes = tuple(names) if names and like is None else getattr(like, "classes", None) or None
        return read(self, self.where, setting, setting, training, classes)
