"""Any table of the user's: a column or two of text, and one of classes or of values."""

import re
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from distill.data.tables import LabelledTexts, Split, find_tables, name_of
from distill.data.tables._rows import TABLES, TEXTS, columns_of, file_rows, labelled_texts, rows_of
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

        Where no training names the classes, those that the data set numbers keep their numbers, which its teachers have
        learned; else they are sorted.
        """
        files, columns = self.files(setting, TABLES), columns_of(setting, (self.text, self.second), self.label)
        sets = rows_of(self, files, setting, columns, quotes=self.quotes)
        classes: tuple[str, ...] = () if like is None else like.classes
        classes = classes or tuple(name.strip() for name in sets[0].classes.get(self.label, ()))
        parse = number if self.regression else lambda value: class_among(value, classes)
        texts, found = labelled_texts(self.place(files), sets, columns, parse, training)
        if self.regression:
            return replace(texts, labels=np.array(found, np.float64))
        classes = classes or _sorted(found, f"{setting}.label={self.label}", setting, training)
        numbers = {name: number for number, name in enumerate(classes)}
        return replace(texts, labels=np.array([numbers[name] for name in found], np.int64), classes=classes)

    def read_unlabelled(self, path: str, setting: str) -> LabelledTexts:
        files, columns = find_tables(path, setting, "unlabelled", TEXTS), columns_of("corpus", (self.text, self.second))
        sets = [file_rows(file, setting, columns, quotes=self.quotes) for file in files]
        return labelled_texts(name_of(files), sets, columns, None, True)[0]


@dataclass
class TableInMemory(Table):
    """The rows of a `datasets.Dataset`; `hub` is what names them in messages."""

    held: Any = None

    def data_set(self, setting: str) -> Any:
        return self.held


def number(value: Any) -> float:
    """The value of a field. Raises ValueError with the reason where it is no finite number."""
    try:
        parsed = float(value)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"its label {str(value)[:40]!r} is no number") from None
    if not abs(parsed) <= LARGEST:
        raise ValueError(f"its label {parsed} is not finite, or beyond {LARGEST:.0e}, whose square fp32 cannot hold")
    return parsed


def class_among(value: Any, classes: tuple[str, ...], numbered: bool = False) -> str:
    """The name of the class in a field, the same for 1, 1.0, "1" and "1.0"; in whatever case `classes` have it.

    A column of whole numbers in which one is missing is one of floats in pandas, and so are its CSV files.

    Args:
        classes: that may be there; none: any.
        numbered: whether a field may hold the number of one of these.

    Raises:
        ValueError: there is none, or another one.
    """
    if isinstance(value, list | dict):
        raise ValueError("several labels, where one class is learnt")
    written = "" if value is None or value != value else str(value).strip()
    name = str(int(written.partition(".")[0])) if WHOLE.fullmatch(written) else written
    if not name or (numbered and name == "-1"):  # the Hub's mark of test sets
        raise ValueError("no label")
    if not classes or name in classes:
        return name
    if numbered and name.isdecimal() and int(name) < len(classes):
        return classes[int(name)]
    alike = [one for one in classes if one in (value, written) or one.lower() == name.lower()]
    if len(alike) != 1:
        raise ValueError(f"its label {name} is none of {', '.join(classes)}")
    return alike[0]


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
