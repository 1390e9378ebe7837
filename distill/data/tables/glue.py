"""The tasks of GLUE (Wang et al. 2018), in which models read one or two sentences: columns, classes and measures.

GLUE's own files are TSV with a column of labels that differs from task to task; on the Hub, in `nyu-mll/glue`, every
task has a column `label`. WNLI is left out: its development set contradicts its training set, so that systems are
compared without it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
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
        self.task = find_task(task, "task")

    @property
    def measures(self) -> tuple[str, ...]:
        return self.task.measures

    def read(self, setting: str, training: bool, like: Any | None = None) -> LabelledTexts:
        return read(self.task, self.where, setting, training)

    def read_unlabelled(self, path: str, setting: str) -> LabelledTexts:
        """Of GLUE's own files those of its test sets will do, whose labels were never published."""
        files = find_unlabelled(path, setting, TEXT_SUFFIXES)
        columns, header = _columns(self.task, files, "corpus")
        return unlabelled_texts(files, setting, columns._replace(label=None), header)


def find_task(name: str, setting: str) -> GlueTask:
    """The task of that name.

    Raises:
        ValueError: there is none; `setting` is what named it.
    """
    if name not in TASKS:
        raise ValueError(f"{setting}={name} is no task of GLUE here: choose one of {', '.join(TASKS)}")
    return TASKS[name]


def read(task: GlueTask, table: TableConfig, setting: str, training: bool) -> LabelledTexts:
    """The examples of a split of a task, from GLUE's own files or from the Hub's, as CSV, Parquet or JSONL too.

    Args:
        table: its path may be the folder of all tasks, of which this task's is taken, or that of the task.
        setting: what error lines call `table`.
        training: leave rows out that cannot be used, and count them; else each of them is an error.

    Raises:
        SettingError: there are no such examples or columns, or a row cannot be used and `training` is false. The test
            sets of GLUE have no labels.
    """
    table = _with_defaults(task, table, setting)
    usual = (f"glue/{task.folder}", task.folder) if table.hub == HUB else ()  # of another data set they are no copies
    files = find_split(table, setting, SUFFIXES, usual)
    columns, header = _columns(task, files, setting)
    rows = read_rows(table, setting, files, columns.fields, header)
    collected = collect(rows, columns, task_label(task), training)
    labels = np.array(collected.labels, np.int64 if task.classes else np.float64)
    name = f"{task.folder} ({table.split})"
    if table.path is not None:
        name = f"{task.folder} ({describe(table, files)})"
    return LabelledTexts(name, collected.first, collected.second, labels, task.classes, collected.left_out)


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


def _with_defaults(task: GlueTask, table: TableConfig, setting: str) -> TableConfig:
    """The Hub's data set where none is named, and the task's own folder below that of all tasks."""
    if table.split == "validation" and table.split not in task.validation:
        raise SettingError(
            f"{setting}.split=validation: {task.folder} has several; set it to {' or '.join(task.validation)}"
        )
    subset = next(name for name, other in TASKS.items() if other is task)
    path = table.path
    if path is not None:
        folders = (Path(path).expanduser() / name for name in (task.folder, subset))
        path = next((str(folder) for folder in folders if folder.is_dir()), path)
    if table.hub is not None:
        return replace(table, path=path)
    return replace(table, path=path, hub=HUB, subset=subset)
