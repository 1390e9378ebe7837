"""Labelled examples for fine-tuning: where they lie, and what every kind of them gives. One file for each kind."""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import numpy as np

from distill.data.find_files import data_folder, files_of_split, find_files, names_of_split
from distill.data.readers import load_hub
from distill.runtime.errors import SettingError
from distill.runtime.progress import counted


@dataclass
class TableConfig:
    """The place of the examples of one split: files if `path` is given or $DISTILL_DATA has them, else the Hub."""

    path: str | None = None  # file, folder or glob; null: the usual folder under $DISTILL_DATA, then `hub`
    hub: str | None = None  # name of a data set on the Hugging Face Hub, or a local folder that `datasets` reads
    subset: str | None = None  # its configuration
    split: str = "train"  # of a Hub data set; of a folder, the files that are called so

    def rows(self, setting: str) -> Any:
        """The data set that `hub` names, as `datasets` has it. Raises SettingError where it cannot be loaded."""
        assert self.hub is not None
        return load_hub(self.hub, self.subset, self.split, False, setting)


@dataclass(frozen=True)
class LabelledTexts:
    """N texts, or pairs of texts, each with the class or the value that is to be predicted, or all without one."""

    name: str  # as the table describes itself
    first: list[str]
    second: list[str] | None  # the other texts of pairs
    labels: np.ndarray  # [N] int64 numbers of classes, or float64 values; [0] of texts without labels
    classes: tuple[str, ...]  # the name of each class by its number; none where values are predicted
    left_out: Counter[str] = field(default_factory=Counter)  # rows that are left out of training, by reason

    def __len__(self) -> int:
        return len(self.first)

    @property
    def texts(self) -> list[tuple[str, ...]]:
        """The texts that a model reads, by example."""
        return [*zip(self.first, self.second, strict=True)] if self.second is not None else [*zip(self.first)]

    def take(self, numbers: np.ndarray) -> Self:
        """Those of these numbers, in that order."""
        second = None if self.second is None else [self.second[number] for number in numbers]
        return replace(self, first=[self.first[n] for n in numbers], second=second, labels=self.labels[numbers])

    def numbered_as(self, classes: tuple[str, ...]) -> Self:
        """The same with its classes numbered as in `classes`; unchanged where one of them is not there.

        Names that differ in the case of letters alone are the same class, whose name here stays.
        """
        numbers = {name.lower(): number for number, name in enumerate(classes)}
        names = {name.lower(): name for name in self.classes}
        is_clear = len(numbers) == len(classes) and len(names) == len(self.classes)
        if not names or not is_clear or not names.keys() <= numbers.keys():
            return self
        order = np.array([numbers[name.lower()] for name in self.classes], np.int64)
        return replace(
            self, labels=order[self.labels], classes=tuple(names.get(name.lower(), name) for name in classes)
        )

    def describe(self) -> str:
        """For example `3,667 examples of MRPC (train); 1 left out: no label`."""
        return f"{counted(len(self), 'example')} of {self.name}{reasons_listed(self.left_out, 'left out')}"


@dataclass
class Split(TableConfig, ABC):
    """One split of labelled examples: a file of this package by `kind`, whose fields are its settings."""

    @abstractmethod
    def read(self, setting: str, training: bool, like: Any | None = None) -> Any:
        """The examples.

        Args:
            setting: what error lines call these settings, such as `corpus`.
            training: leave out, and count, what cannot be used; in evaluation that is an error.
            like: the examples of training, whose classes these have to have; None: these are them.

        Raises:
            SettingError: there are none, or they do not fit.
        """

    @abstractmethod
    def read_unlabelled(self, path: str, setting: str) -> Any:
        """Examples of the same form without labels, whatever labels the files have; bad rows are left out and counted.

        Args:
            path: file, folder or glob.
            setting: which names it, such as `corpus.unlabelled`.

        Raises:
            SettingError: there are none.
        """


def reasons_listed(reasons: Counter[str], what: str) -> str:
    """For example `; 3 left out: no label (2), no text (1)`; nothing where there are none."""
    if not reasons:
        return ""
    parts = ", ".join(reason if len(reasons) == 1 else f"{reason} ({count:,})" for reason, count in reasons.items())
    return f"; {reasons.total():,} {what}: {parts}"


def find_split(table: TableConfig, setting: str, suffixes: tuple[str, ...], usual: Sequence[str] = ()) -> list[Path]:
    """The files of a split, sorted by name; none where it comes from the Hub.

    Args:
        setting: what error lines call `table`, such as `evaluate.sources.dev`.
        suffixes: of the files that are taken from a folder.
        usual: folders below $DISTILL_DATA to look into, where `table` has no path.

    Raises:
        SettingError: there are none.
    """
    if table.path is not None:
        files = find_files(table.path, f"{setting}.path", lambda folder: files_of_split(folder, table.split, suffixes))
        if not files:
            names = ", ".join(f"{name}*{suffix}" for name in names_of_split(table.split)[:1] for suffix in suffixes)
            raise SettingError(
                f"{setting}.path={table.path}: no file of the split {table.split} in this folder ({names}); give "
                f"another folder, a file, or {setting}.split"
            )
        return files
    data = data_folder()
    for folder in [data / name for name in usual] if data is not None else []:
        if folder.is_dir() and (files := files_of_split(folder, table.split, suffixes)):
            return files
    if table.hub is None:
        cure = ", or set DISTILL_DATA to a folder that holds them" if usual else ""
        raise SettingError(
            f"{setting}.path=null: no examples were found; give {setting}.path{cure}, or name a data set as "
            f"{setting}.hub"
        )
    return []


def find_unlabelled(path: str, setting: str, suffixes: tuple[str, ...]) -> list[Path]:
    """The files of examples without labels, sorted by name.

    Args:
        path: file, folder or glob; of a folder that holds files of any split, those called `unlabelled*` alone, so that
            no text of an evaluation set is trained on by accident.
        setting: which names it.

    Raises:
        SettingError: there are none.
    """
    files = find_files(path, setting, lambda folder: files_of_split(folder, "unlabelled", suffixes))
    if not files:
        names = ", ".join(f"unlabelled*{suffix}" for suffix in suffixes)
        raise SettingError(f"{setting}={path}: no file of unlabelled examples in this folder ({names}); name a file")
    return files


def describe(table: TableConfig, files: Sequence[Path]) -> str:
    """A few words for the banner."""
    if not files:
        return f"{table.hub} ({f'{table.subset}, ' if table.subset else ''}{table.split})"
    return files[0].name if len(files) == 1 else f"{len(files):,} files in {files[0].parent.name}"
