"""Any table of the user's: a column or two of text, and one of classes or of values."""

import re
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from distill.data.tables import LabelledTexts, Split, find_tables, name_of
from distill.data.tables._rows import SUFFIXES, TEXT_SUFFIXES, fields_of, file_rows, hub_rows, labelled_texts
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
        files = self.files(setting, SUFFIXES)
        fields = fields_of(setting, (self.text, self.second), self.label)
        setting_of = {column: key for key, column in fields.items()}
        if twice := [key for key, column in fields.items() if setting_of[column] != key]:
            column = fields[twice[0]]
            raise SettingError(f"{setting_of[column]}={column} is also {twice[0]}: name another column for one of them")
        sets = [file_rows(path, f"{setting}.path", fields, quotes=self.quotes) for path in files]
        sets = sets or [hub_rows(self, setting, fields)]
        classes: tuple[str, ...] | None = None if like is None else like.classes or None
        classes = classes or tuple(name.strip() for name in sets[0].classes.get(self.label, ())) or None
        parse = number if self.regression else lambda value: class_among(value, classes)
        texts, found = labelled_texts(self.place(files), sets, fields, parse, training, setting)
        if self.regression:
            return replace(texts, labels=np.array(found, np.float64))
        classes = classes or _sorted(found, f"{setting}.label={self.label}", setting, training)
        numbers = {name: number for number, name in enumerate(classes)}
        return replace(texts, labels=np.array([numbers[name] for name in found], np.int64), classes=classes)

    def read_unlabelled(self, path: str, setting: str) -> LabelledTexts:
        files = find_tables(path, setting, "unlabelled", TEXT_SUFFIXES)
        fields = fields_of("corpus", (self.text, self.second))
        sets = (file_rows(file, setting, fields, quotes=self.quotes) for file in files)
        return labelled_texts(name_of(files), sets, fields, None, True, setting)[0]


@dataclass
class TableInMemory(Table):
    """The rows of a `datasets.Dataset`; `hub` is what names them in messages."""

    held: Any = None

    def hub_data(self, setting: str) -> Any:
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


def class_of(value: Any) -> str:
    """The name of the class in a field, the same for 1, 1.0, "1" and "1.0". Raises ValueError where there is none.

    A column of whole numbers in which one is missing is one of floats in pandas, and so are its CSV files.
    """
    if isinstance(value, list | dict):
        raise ValueError("several labels, where one class is learnt")
    name = "" if value is None or value != value else str(value).strip()
    if not name:
        raise ValueError("no label")
    return str(int(name.partition(".")[0])) if WHOLE.fullmatch(name) else name


def class_among(value: Any, classes: tuple[str, ...] | None) -> str:
    """The class in a field as one of these, else in other letters' case. Raises ValueError where it is none of them."""
    name = class_of(value)
    if classes is None or name in classes:
        return name
    alike = [one for one in classes if one in (value, str(value).strip()) or one.lower() == name.lower()]
    if len(alike) != 1:
        raise ValueError(f"its class {name} is none of training's ({', '.join(classes)})")
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
