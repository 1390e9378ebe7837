"""Any table of the user's: a column or two of text, and one of classes or of values."""

import math
import re
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from distill.data.readers import has_utf8
from distill.data.tables import LabelledTexts, Split, TableConfig, describe, find_split, find_unlabelled
from distill.data.tables._rows import SUFFIXES, Columns, collect, read_rows
from distill.data.tables._unlabelled import TEXT_SUFFIXES, unlabelled_texts
from distill.runtime.errors import SettingError

WHOLE = re.compile(r"-?\d+\.0*")  # a whole number as programs write one among floats
LARGEST = 1e15  # of a value: the squared error of a batch has to be a number in fp32


@dataclass
class Table(Split):
    """One split of a table of the user's.

    `text`: the column of the text. `second`: the column of the other text, where the examples are pairs. `label`: the
    column of the class or value. `regression`: whether the label is a value and not the name of a class. `quotes`:
    whether fields may be in quotation marks; null: in CSV files, not in TSV files.
    """

    text: str = "text"
    second: str | None = None
    label: str = "label"
    regression: bool = False
    quotes: bool | None = None

    measures: ClassVar[tuple[str, ...]] = ()  # those for classes, or for values

    def read(self, setting: str, training: bool, like: Any | None = None) -> LabelledTexts:
        """As of every split.

        Where no training names the classes, those that the Hub data set numbers keep their numbers, which its teachers
        have learned; else they are sorted.
        """
        files = find_split(self, setting, SUFFIXES)
        columns = Columns(self.text, self.second, self.label, setting)
        columns.check()
        table: TableConfig = self
        classes: tuple[str, ...] | None = None if like is None else like.classes or None
        if not files:
            held = self.rows(setting)
            table = TableInMemory(hub=self.hub, subset=self.subset, split=self.split, held=held)
            numbered = getattr(held.features.get(self.label), "names", None) or ()
            classes = classes or tuple(name.strip() for name in numbered) or None
        rows = read_rows(table, setting, files, columns.fields, quotes=self.quotes)
        collected = collect(rows, columns, lambda value: self._label(value, classes), training)
        if self.regression:
            labels, classes = np.array(collected.labels, np.float64), ()
        else:
            classes = classes or _sorted(collected.labels, f"{setting}.label={self.label}", setting, training)
            numbers = {name: number for number, name in enumerate(classes)}
            labels = np.array([numbers[name] for name in collected.labels], np.int64)
        name = describe(self, files)
        return LabelledTexts(name, collected.first, collected.second, labels, classes, collected.left_out)

    def _label(self, value: Any, classes: tuple[str, ...] | None) -> float | str:
        """The label in a field. Raises ValueError with the reason where it is none, or none of these classes."""
        if self.regression:
            return number(value)
        if classes is not None and isinstance(value, str) and value.strip() in classes:
            return value.strip()
        name = class_of(value)
        if classes is None or name in classes:
            return name
        alike = [one for one in classes if one.lower() == name.lower()]
        if len(alike) != 1:
            raise ValueError(f"its class {name} is none of training's ({', '.join(classes)})")
        return alike[0]

    def read_unlabelled(self, path: str, setting: str) -> LabelledTexts:
        columns = Columns(self.text, self.second, None, "corpus")
        files = find_unlabelled(path, setting, TEXT_SUFFIXES)
        return unlabelled_texts(files, setting, columns, quotes=self.quotes)


@dataclass
class TableInMemory(Table):
    """The rows of a `datasets.Dataset`; `hub` is what names them in messages."""

    held: Any = None

    def rows(self, setting: str) -> Any:
        return self.held


def number(value: Any) -> float:
    """The value of a field. Raises ValueError with the reason where it is no finite number."""
    if value is None or value == "":
        raise ValueError("no label")
    try:
        parsed = float(value)
    except (TypeError, ValueError):
        raise ValueError("its label is no number") from None
    except OverflowError:
        parsed = math.inf
    if not math.isfinite(parsed):
        raise ValueError("its label is not finite")
    if abs(parsed) > LARGEST:
        raise ValueError(f"its label is beyond {LARGEST:.0e}, whose square fp32 cannot hold: scale the column")
    return parsed


def class_of(value: Any) -> str:
    """The name of the class in a field, the same for 1, 1.0, "1" and "1.0". Raises ValueError where there is none.

    A column of whole numbers in which one is missing is one of floats in pandas, and so are its CSV files.
    """
    if isinstance(value, list | dict):
        raise ValueError("several labels, where one class is learnt")
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    name = "" if value is None or value != value else str(value).strip()
    if not name:
        raise ValueError("no label")
    if WHOLE.fullmatch(name):
        name = str(int(name.partition(".")[0]))
    if not has_utf8(name):
        raise ValueError("half a surrogate pair in its label")
    return name


def _sorted(names: list[str], label: str, setting: str, training: bool) -> tuple[str, ...]:
    """The classes that occur: by their value where all are whole numbers, else by name."""
    classes = set(names)
    if training and len(classes) < 2:
        raise SettingError(f"{label}: its only class is {classes.pop()}; two are needed to learn")
    if all(re.fullmatch(r"-?\d+", name) for name in classes):
        return tuple(sorted(classes, key=lambda name: (int(name), name)))
    if all(re.fullmatch(r"-?\d*\.?\d+([eE][-+]?\d+)?", name) for name in classes):
        raise SettingError(
            f"{label}: it holds numbers such as {min(classes)}, not classes; set {setting}.regression=true"
        )
    return tuple(sorted(classes))
