"""Any table of the user's: a column or two of text, and one of classes or of values."""

import math
import re
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from distill.data.readers import has_utf8
from distill.data.tables import LabelledTexts, RowsConfig, Split, TableConfig, describe, find_split, find_unlabelled
from distill.data.tables._rows import SUFFIXES, Columns, collect, read_rows
from distill.data.tables._unlabelled import TEXT_SUFFIXES, unlabelled_texts
from distill.runtime.errors import SettingError

LARGEST = 1e15  # of a value: the squared error of a batch has to be a number in fp32


@dataclass
class ColumnsConfig:
    """What the columns of a table hold.

    `text`: the column of the text. `second`: the column of the other text, where the examples are pairs. `label`: the
    column of the class or value. `regression`: whether the label is a value and not the name of a class. `quotes`:
    whether fields may be in quotation marks; null: in CSV files, not in TSV files.
    """

    text: str = "text"
    second: str | None = None
    label: str = "label"
    regression: bool = False
    quotes: bool | None = None


@dataclass
class Table(ColumnsConfig, Split):
    """One split of a table of the user's."""

    measures: ClassVar[tuple[str, ...]] = ()  # those for classes, or for values

    def read(self, setting: str, training: bool, like: Any | None = None) -> LabelledTexts:
        classes = None if like is None else like.classes or None
        return read(self, self.where, setting, setting, training, classes)

    def read_unlabelled(self, path: str, setting: str) -> LabelledTexts:
        columns = Columns(self.text, self.second, None, "corpus")
        files = find_unlabelled(path, setting, TEXT_SUFFIXES)
        return unlabelled_texts(files, setting, columns, quotes=self.quotes)


def read(
    columns: ColumnsConfig,
    table: TableConfig,
    columns_setting: str,
    setting: str,
    training: bool,
    classes: tuple[str, ...] | None = None,
) -> LabelledTexts:
    """The examples of a split.

    Args:
        columns_setting: what error lines call `columns`.
        setting: what error lines call `table`.
        training: leave rows out that cannot be used, and count them; else each of them is an error.
        classes: those of the training examples, where these are others; None: those that the Hub data set numbers, so
            that they keep the numbers that its teachers have learned, else the classes that occur, sorted.

    Raises:
        SettingError: there are no such examples or columns, or a row cannot be used and `training` is false.
    """
    files = find_split(table, setting, SUFFIXES)
    names = Columns(columns.text, columns.second, columns.label, columns_setting)
    names.check()
    if not files:
        table = RowsConfig(None, table.hub, table.subset, table.split, table.rows(setting))
        numbered = getattr(table.held.features.get(columns.label), "names", None) or ()
        classes = classes or tuple(name.strip() for name in numbered) or None
    rows = read_rows(table, setting, files, names.fields, quotes=columns.quotes)
    allowed = None if classes is None else set(classes)

    def parse(value: Any) -> float | str:
        if columns.regression:
            return number(value)
        name = class_of(value)
        if allowed is not None and name not in allowed:
            raise ValueError(f"its class {name} is none of training's ({', '.join(classes or ())})")
        return name

    collected = collect(rows, names, parse, training)
    if columns.regression:
        labels, classes = np.array(collected.labels, np.float64), ()
    else:
        classes = classes or _sorted(collected.labels, columns, columns_setting)
        numbers = {name: number for number, name in enumerate(classes)}
        labels = np.array([numbers[name] for name in collected.labels], np.int64)
    return LabelledTexts(describe(table, files), collected.first, collected.second, labels, classes, collected.left_out)


def number(value: Any) -> float:
    """The value of a field. Raises ValueError with the reason where it is no finite number."""
    if value is None or value == "":
        raise ValueError("no label")
    try:
        parsed = float(value)
    except (TypeError, ValueError):
        raise ValueError("its label is no number") from None
    if not math.isfinite(parsed):
        raise ValueError("its label is not finite")
    if abs(parsed) > LARGEST:
        raise ValueError(f"its label is beyond {LARGEST:.0e}, whose square fp32 cannot hold: scale the column")
    return parsed


def class_of(value: Any) -> str:
    """The name of the class in a field, the same for 1, 1.0 and "1". Raises ValueError where there is none."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    name = "" if value is None or value != value else str(value).strip()
    if not name:
        raise ValueError("no label")
    if not has_utf8(name):
        raise ValueError("half a surrogate pair in its label")
    return name


def _sorted(names: list[str], columns: ColumnsConfig, setting: str) -> tuple[str, ...]:
    """The classes that occur: by their value where all are whole numbers, else by name."""
    classes = set(names)
    if len(classes) < 2:
        raise SettingError(
            f"{setting}.label={columns.label}: its only class is {classes.pop()}; two are needed to learn"
        )
    if all(re.fullmatch(r"-?\d+", name) for name in classes):
        return tuple(sorted(classes, key=lambda name: (int(name), name)))
    if all(re.fullmatch(r"-?\d*\.?\d+([eE][-+]?\d+)?", name) for name in classes):
        raise SettingError(
            f"{setting}.label={columns.label}: it holds numbers such as {min(classes)}, not classes; set "
            f"{setting}.regression=true"
        )
    return tuple(sorted(classes))
