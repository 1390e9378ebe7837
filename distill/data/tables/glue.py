"""The tasks of GLUE (Wang et al. 2018), in which models read one or two sentences: columns, classes and measures.

GLUE's own files are TSV with a column of labels that differs from task to task; on the Hub, in `nyu-mll/glue`, every
task has a column `label`. WNLI is left out: its development set contradicts its training set, so that systems are
compared without it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from distill.data.find_files import File
from distill.data.tables import LabelledTexts, Split, find_tables, name_of
from distill.data.tables._rows import TABLES, TEXTS, Columns, columns_of, file_rows, kind_of, labelled_texts, rows_of
from distill.data.tables.table import class_among, number
from distill.runtime.errors import SettingError

HUB = "nyu-mll/glue"
PAIR = ("sentence1", "sentence2")
ENTAILMENT = ("entailment", "not_entailment")
OF_PARAPHRASES = ("f1", "accuracy")


@dataclass(frozen=True)
class GlueTask:
    """One task."""

    folder: str  # what GLUE's own distribution calls it
    texts: tuple[str, ...]  # the columns of its text on the Hub
    classes: tuple[str, ...]  # in the Hub's order; none where a value is predicted
    measures: tuple[str, ...] = ("accuracy",)  # by which GLUE scores it; the first decides which model is better
    tsv_texts: tuple[str, ...] = ()  # the columns of its text in TSV files, where they have other names
    tsv_label: str = "label"  # the column of its label in TSV files
    tsv_header: tuple[str, ...] = ()  # all columns, where the files of training and development have no header
    validation: tuple[str, ...] = ("validation",)  # the Hub's names of its development sets


MNLI = ("entailment", "neutral", "contradiction")
COLA = ("source", "label", "mark", "sentence")
TASKS = {
    "sst2": GlueTask("SST-2", ("sentence",), ("negative", "positive")),
    "mrpc": GlueTask(
        "MRPC", PAIR, ("not_equivalent", "equivalent"), OF_PARAPHRASES, ("#1 String", "#2 String"), "Quality"
    ),
    "rte": GlueTask("RTE", PAIR, ENTAILMENT),
    "cola": GlueTask("CoLA", ("sentence",), ("unacceptable", "acceptable"), ("matthews",), tsv_header=COLA),
    "mnli": GlueTask(
        "MNLI", ("premise", "hypothesis"), MNLI, tsv_texts=PAIR, tsv_label="gold_label",
        validation=("validation_matched", "validation_mismatched"),
    ),
    "qnli": GlueTask("QNLI", ("question", "sentence"), ENTAILMENT),
    "qqp": GlueTask(
        "QQP", ("question1", "question2"), ("not_duplicate", "duplicate"), OF_PARAPHRASES, tsv_label="is_duplicate"
    ),
    "stsb": GlueTask("STS-B", PAIR, (), ("pearson", "spearman"), tsv_label="score"),
}  # fmt: skip


@dataclass(kw_only=True)
class Glue(Split):
    """One split of one of the tasks.

    `task`: the task: sst2, mrpc, rte, cola, mnli, qnli, qqp or stsb.
    """

    task: str

    def __post_init__(self) -> None:
        if self.task not in TASKS:
            raise ValueError(f"task={self.task} is no task of GLUE here: choose one of {', '.join(TASKS)}")

    @property
    def described(self) -> GlueTask:
        """What is known of the task."""
        return TASKS[self.task]

    @property
    def measures(self) -> tuple[str, ...]:
        return self.described.measures

    def read(self, setting: str, training: bool, like: Any | None = None) -> LabelledTexts:
        """As of every split, from GLUE's own files or from the Hub's, as CSV, Parquet or JSONL too.

        The path may be the folder of all tasks, of which this task's is taken, or that of the task. The test sets of
        GLUE have no labels.
        """
        task = self.described
        if self.split == "validation" and self.split not in task.validation:
            raise SettingError(
                f"{setting}.split=validation: {task.folder} has several; set it to {' or '.join(task.validation)}"
            )
        split = self if self.hub is not None else replace(self, hub=HUB, subset=self.task)
        usual = (f"glue/{task.folder}", task.folder) if split.hub == HUB else ()  # of another data set it is no copy
        files = split.files(setting, TABLES, usual, within=(task.folder, self.task))
        columns = self._columns(files, setting)
        sets = rows_of(split, files, setting, columns, task.tsv_header)
        name = f"{task.folder} ({self.split if self.path is None else self.place(files)})"
        parse = (lambda value: class_among(value, task.classes, numbered=True)) if task.classes else number
        texts, found = labelled_texts(name, sets, columns, parse, training)
        labels = np.array([task.classes.index(name) for name in found], np.int64) if task.classes else np.array(found)
        examples = replace(texts, labels=labels, classes=task.classes)
        return examples if like is None else examples.numbered_as(like.classes)

    def read_unlabelled(self, path: str, setting: str) -> LabelledTexts:
        """Of GLUE's own files those of its test sets will do, whose labels were never published."""
        files = find_tables(path, setting, "unlabelled", TEXTS)
        columns = self._columns(files, "corpus")
        columns.pop("corpus.label")
        sets = [file_rows(file, setting, columns, self.described.tsv_header) for file in files]
        return labelled_texts(name_of(files), sets, columns, None, True)[0]

    def _columns(self, files: Sequence[File], setting: str) -> Columns:
        """The columns that are read from these files, or from the Hub without any."""
        task = self.described
        if not files or kind_of(files[0].place) != "tsv":
            return columns_of(setting, task.texts, "label")
        return columns_of(setting, task.tsv_texts or task.texts, task.tsv_label)
