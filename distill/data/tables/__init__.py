"""Labelled examples for fine-tuning: where they lie, and what every kind of them gives. One file for each kind."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np

from distill.data.find_files import File, data_folder, find_files, of_split
from distill.data.readers import load_hub
from distill.runtime.errors import SettingError
from distill.runtime.progress import counted


@dataclass(frozen=True)
class LabelledTexts:
    """N texts, or pairs of texts, each with the class or the value that is to be predicted, or all without one."""

    name: str  # as the table describes itself
    first: list[str]
    second: list[str] | None  # the other texts of pairs
    labels: np.ndarray  # [N] int64 numbers of classes, or float64 values; [0] of texts without labels
    classes: tuple[str, ...]  # the name of each class by its number; none where values are predicted
    left_out: int = 0  # rows that are left out of training

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
        ordered = tuple(names.get(name.lower(), name) for name in classes)
        return replace(self, labels=order[self.labels], classes=ordered)

    def describe(self) -> str:
        """For example `3,667 examples of MRPC (train); 1 left out, without a text or label that can be used`."""
        end = f"; {self.left_out:,} left out, without a text or label that can be used" if self.left_out else ""
        return f"{counted(len(self), 'example')} of {self.name}{end}"


@dataclass
class Split(ABC):
    """One split of labelled examples: a file of this package by `kind`, whose fields are its settings."""

    path: str | None = None  # file, folder or glob; null: the usual folder under $DISTILL_DATA, then `hub`
    hub: str | None = None  # name of a data set on the Hugging Face Hub, or a local folder that `datasets` reads
    subset: str | None = None  # its configuration
    split: str = "train"  # of a Hub data set; of a folder, the files that are called so

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

    def files(
        self, setting: str, endings: tuple[str, ...], usual: Sequence[str] = (), within: Sequence[str] = ()
    ) -> list[File]:
        """The files of the split, sorted by name; none where it comes from the Hub. Raises SettingError as `read`.

        Args:
            endings: of the files that are taken from a folder.
            usual: folders below $DISTILL_DATA to look into, where there is no path.
            within: folders of which the first that is in the path takes its place.
        """
        if self.path is not None:
            folders = (Path(self.path).expanduser() / name for name in within)
            path = next((str(folder) for folder in folders if folder.is_dir()), self.path)
            return find_tables(path, f"{setting}.path", self.split, endings)
        data = data_folder()
        for folder in [data / name for name in usual] if data is not None else []:
            if folder.is_dir() and (files := of_split(find_files(str(folder), setting, endings), self.split)):
                return files
        if self.hub is None:
            cure = ", or set DISTILL_DATA to a folder that holds them" if usual else ""
            raise SettingError(
                f"{setting}.path=null: no examples were found; give {setting}.path{cure}, or name a data set as "
                f"{setting}.hub"
            )
        return []

    def data_set(self, setting: str) -> Any:
        """The data set that `hub` names. Raises SettingError where it cannot be loaded."""
        return load_hub(str(self.hub), self.subset, self.split, False, setting)

    def place(self, files: Sequence[File]) -> str:
        """Where the examples lie, for the banner: in these files, or on the Hub."""
        return name_of(files) if files else f"{self.hub} ({f'{self.subset}, ' if self.subset else ''}{self.split})"


def name_of(files: Sequence[File]) -> str:
    """A few words for files."""
    if len(files) == 1:
        return files[0].name
    return f"{len(files):,} files in {Path(files[0].place).absolute().parent.name}"


def find_tables(path: str, setting: str, split: str, endings: tuple[str, ...]) -> list[File]:
    """The files of a split, sorted by name. A folder without files of any split is taken whole.

    Raises:
        SettingError: there are none; `setting` names the path.
    """
    files = of_split(find_files(path, setting, endings), split)
    if not files:
        names = ", ".join(f"{split}*{ending}" for ending in endings)
        problem = f"no file of the split {split} in this folder ({names})"
        raise SettingError(problem, setting=setting, value=path, cure="give a file, another folder, or another split")
    return files
