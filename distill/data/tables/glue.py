"""The tasks of GLUE (Wang et al. 2018), in which models read one or two sentences: columns, classes and measures.

GLUE's own files are TSV with a column of labels that differs from task to task; on the Hub, in `nyu-mll/glue`, every
task has a column `label`. WNLI is left out: its development set contradicts its training set, so that systems are
compared without it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from distill.data.tables import LabelledTexts, Split, TableConfig, describe, find_split, find_unlabelled
from distill.data.tables._rows import SUFFIXES, Columns, collect, kind_of, read_rows
from distill.data.tables._unlabelled import TEXT_SUFFIXES, unlabelled_texts
from distill.data.tables.table import class_of, number
from distill.runtime.errors import SettingError

HUB = "nyu-mll/glue"
ENTAILMENT = ("entailment", "not_entailment")


@dataclass(frozen=True)
class GlueTask:
    """One task.

    Attributes:
        folder: what GLUE's own distribution calls it.
        texts: the columns of its text on the Hub.
        classes: in the Hub's order; none where a value is predicted.
        measures: by which GLUE scores it; the first decides which of two models is better.
        tsv_texts: the columns of its text in TSV files, where they have other names.
        tsv_label: the column of its label in TSV files.
        tsv_header: all columns, where the files of training and development have no header.
        validation: the Hub's names of its development sets.
    """

    folder: str
    texts: tuple[str, ...]
    classes: tuple[str, ...]
    measures: tuple[str, ...] = ("accuracy",)
    tsv_texts: tuple[str, ...] = ()
    tsv_label: str = "label"
    tsv_header: tuple[str, ...] = ()
    validation: tuple[str, ...] = ("validation",)


TASKS = {
    "sst2": GlueTask("SST-2", ("sentence",), ("negative", "positive")),
    "mrpc": GlueTask(
        "MRPC",
        ("sentence1", "sentence2"),
        ("not_equivalent", "equivalent"),
        ("f1", "accuracy"),
        tsv_texts=("#1 String", "#2 String"),
        tsv_label="Quality",
    ),
    "rte": GlueTask("RTE", ("sentence1", "sentence2"), ENTAILMENT),
    "cola": GlueTask(
        "CoLA",
        ("sentence",),
        ("unacceptable", "acceptable"),
        ("matthews",),
        tsv_header=("source", "label", "mark", "sentence"),
    ),
    "mnli": GlueTask(
        "MNLI",
        ("premise", "hypothesis"),
        ("entailment", "neutral", "contradiction"),
        tsv_texts=("sentence1", "sentence2"),
        tsv_label="gold_label",
        validation=("validation_matched", "validation_mismatched"),
    ),
    "qnli": GlueTask("QNLI", ("question", "sentence"), ENTAILMENT),
    "qqp": GlueTask(
        "QQP",
        ("question1", "question2"),
        ("not_duplicate", "duplicate"),
        ("f1", "accuracy"),
        tsv_label="is_duplicate",
    ),
    "stsb": GlueTask("STS-B", ("sentence1", "sentence2"), (), ("pearson", "spearman"), tsv_label="score"),
}


class Glue(Split):
    """One split of one of the tasks."""

    def __init__(
        self,
        task: str,
        path: str | None = None,
        hub: str | None = None,
        subset: str | None = None,
        split: str = "train",
    ) -> None:
        """`task`: the task: sst2, mrpc, rte, cola, mnli, qnli, qqp or stsb."""
        super().__init__(path, hub, subset, split)
        if task not in TASKS:
            raise ValueError(f"task={task} is no task of GLUE here: choose one of {', '.join(TASKS)}")
        self.name, self.task = task, TASKS[task]

    @property
    def measures(self) -> tuple[str, ...]:
        return self.task.measures

    def read(self, setting: str, training: bool, like: Any | None = None) -> LabelledTexts:
        """As of every split, from GLUE's own files or from the Hub's, as CSV, Parquet or JSONL too.

        The path may be the folder of all tasks, of which this task's is taken, or that of the task. The test sets of
        GLUE have no labels.
        """
        task, table = self.task, self._place(setting)
        usual = (f"glue/{task.folder}", task.folder) if table.hub == HUB else ()  # another data set has no copies there
        files = find_split(table, setting, SUFFIXES, usual)
        columns, header = _columns(task, files, setting)
        rows = read_rows(table, setting, files, columns.fields, header)
        collected = collect(rows, columns, task_label(task), training)
        labels = np.array(collected.labels, np.int64 if task.classes else np.float64)
        name = f"{task.folder} ({table.split if table.path is None else describe(table, files)})"
        examples = LabelledTexts(name, collected.first, collected.second, labels, task.classes, collected.left_out)
        return examples if like is None else examples.numbered_as(like.classes)

    def _place(self, setting: str) -> TableConfig:
        """The Hub's data set where none is named, and the task's own folder below that of all tasks."""
        if self.split == "validation" and self.split not in self.task.validation:
            raise SettingError(
                f"{setting}.split=validation: {self.task.folder} has several; set it to "
                f"{' or '.join(self.task.validation)}"
            )
        path = self.path
        if path is not None:
            folders = (Path(path).expanduser() / name for name in (self.task.folder, self.name))
            path = next((str(folder) for folder in folders if folder.is_dir()), path)
        if self.hub is not None:
            return TableConfig(path, self.hub, self.subset, self.split)
        return TableConfig(path, HUB, self.name, self.split)

    def read_unlabelled(self, path: str, setting: str) -> LabelledTexts:
        """Of GLUE's own files those of its test sets will do, whose labels were never published."""
        files = find_unlabelled(path, setting, TEXT_SUFFIXES)
        columns, header = _columns(self.task, files, "corpus")
        return unlabelled_texts(files, setting, columns._replace(label=None), header)


def _columns(task: GlueTask, files: Sequence[Path], setting: str) -> tuple[Columns, tuple[str, ...]]:
    """The columns that count in these files, or on the Hub where there are none, and all of files without a header."""
    plain = bool(files) and kind_of(files[0]) in ("tsv", "txt")
    texts = (task.tsv_texts or task.texts) if plain else task.texts
    columns = Columns(texts[0], (*texts, None)[1], task.tsv_label if plain else "label", setting)
    return columns, task.tsv_header if plain else ()


def task_label(task: GlueTask) -> Callable[[Any], int | float]:
    """What turns the content of a field into the number of a class, by its name or its number, or into a value."""
    if not task.classes:
        return number
    numbers = {name: number for number, name in enumerate(task.classes)}
    numbers |= {str(number): number for number in range(len(task.classes))}

    def parse(value: Any) -> int:
        name = class_of(value)
        if name == "-1":  # the Hub's mark of test sets
            raise ValueError("no label")
        if name not in numbers:
            raise ValueError(f"its label {name} is none of {', '.join(task.classes)}")
        return numbers[name]

    return parse
