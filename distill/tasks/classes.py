"""Classes and values of texts: fine-tuning on GLUE and on tables of the user's."""

import logging
from dataclasses import replace
from typing import Any, Self

from transformers import PreTrainedTokenizerBase

from distill.config.settings import Config
from distill.data.collate.tables import Labelled
from distill.data.tables import LabelledTexts, Split
from distill.data.tables.glue import Glue
from distill.data.tables.table import Table
from distill.data.text_pairs import ClassSequences, class_sequences
from distill.evaluation.classes import OF_TABLES, ClassSet
from distill.models.kind import CLASSES, ModelKind
from distill.runtime.errors import SettingError
from distill.runtime.progress import counted
from distill.tasks._table import LabelledData, TableTask

logger = logging.getLogger(__name__)


class Classes(TableTask):
    """Sequences of one text or two; the measures of GLUE's task, or those for classes or for values."""

    kind: ModelKind = CLASSES
    labels: tuple[str, ...] = ("class",)
    noun = "labelled texts"
    corpora = ("glue", "table")

    def __init__(self, data: LabelledData | None = None) -> None:
        super().__init__(data)
        self.kind = CLASSES if data is None else replace(CLASSES, fields=_head_fields(data.examples.classes))

    def read(self, config: Config, training: bool = True) -> Self:
        """As of every table; raises SettingError where all values that are to be learned are the same."""
        task = super().read(config, training)
        data = task.data
        if training and not data.examples.classes and len(set(data.examples.labels.tolist())) == 1:
            raise SettingError(
                f"{_label_setting('corpus', data.split)}: {data.examples.describe()}, and the only value is "
                f"{data.examples.labels[0]:g}; two are needed to learn{_more('corpus.max_sequences')}"
            )
        return task

    def of_model(self, names: tuple[str, ...]) -> Self:
        """For a model that exists, whose outputs have these names: a set need not have examples of all its classes."""
        examples = self.data.examples.numbered_as(names)
        if len(examples.classes) == 1:
            raise SettingError(
                f"{examples.describe()}, all of the class {examples.classes[0]}, and the model gives "
                f"{_labels_listed(names)}: choose another set"
            )
        return type(self)(replace(self.data, examples=examples))

    def sequences(
        self,
        split: Glue | Table,
        examples: LabelledTexts,
        tokenizer: PreTrainedTokenizerBase,
        config: Config,
        setting: str,
    ) -> ClassSequences:
        length = config.corpus.sequence_length
        sequences = class_sequences(examples, tokenizer, length, "corpus.sequence_length")
        if sequences.cut:
            of_all = f"{sequences.cut:,} of {counted(len(examples), 'example')}"
            logger.info(f"{examples.name}: {of_all} are cut off at their ends: raise corpus.sequence_length={length}")
        return sequences

    def collator(self, sequences: ClassSequences) -> Labelled:
        return Labelled(sequences)

    def evaluation_set(
        self, name: str, split: Glue | Table, examples: LabelledTexts, sequences: ClassSequences
    ) -> ClassSet:
        of_task = [one.lower() for one in split.described.classes] if isinstance(split, Glue) else []
        classes = [name.lower() for name in examples.classes]
        learnt = [name.lower() for name in self.data.examples.classes]
        if classes != learnt or (of_task and len(classes) != len(of_task)):
            raise SettingError(
                f"{_label_setting(f'evaluate.sources.{name}', split)}: {examples.describe()}, whose labels are "
                f"{_labels_listed(examples.classes[: len(of_task) or None])}, and the student learns "
                f"{_labels_listed(self.data.examples.classes)}: choose another set"
            )
        data = ClassSet(
            name,
            examples.describe(),
            sequences.sequences,
            documents=len(examples),
            collator=self.collator(sequences),
            labels=examples.labels,
            classes=examples.classes,
            measures=tuple(split.measures) or OF_TABLES[bool(examples.classes)],
            detects_first=len(of_task) == 2 and classes[0] == of_task[1],
        )
        if impossible := data.impossible_measures():
            raise SettingError(
                f"{_label_setting(f'evaluate.sources.{name}', split)}: {data.description}, all with one text or one "
                f"label, so no model has a value of {' or '.join(impossible)} there: give examples with other texts "
                f"and labels{_more('evaluate.max_sequences')}"
            )
        return data


def _label_setting(setting: str, split: Split) -> str:
    """What names the column of labels; of GLUE's tasks none does."""
    return f"{setting}.label={split.label}" if isinstance(split, Table) else setting


def _labels_listed(classes: tuple[str, ...]) -> str:
    return ", ".join(classes) or "values"


def _more(setting: str) -> str:
    return f", or raise {setting} where it leaves the others out"


def _head_fields(names: tuple[str, ...]) -> dict[str, Any]:
    """What a model's configuration has of its head; without names of classes that predicts a value."""
    outputs = names or ("value",)
    return {
        "id2label": dict(enumerate(outputs)),
        "label2id": {name: number for number, name in enumerate(outputs)},
        "problem_type": "single_label_classification" if names else "regression",
    }
