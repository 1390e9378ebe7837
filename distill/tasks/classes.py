"""Classes and values of texts: fine-tuning on GLUE and on tables of the user's."""

from dataclasses import replace
from typing import Any, Self

from transformers import PreTrainedTokenizerBase

from distill.config.settings import Config
from distill.data.class_sequences import ClassSequences, class_sequences
from distill.data.collate import classes
from distill.data.tables import LabelledTexts, Split
from distill.data.tables.glue import Glue
from distill.data.tables.table import Table
from distill.evaluation.measures.classes import ClassSet, class_set, impossible_measures
from distill.models.kind import CLASSES, ModelKind
from distill.runtime.errors import SettingError
from distill.tasks._table import LabelledData, TableTask


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

    def sequences(
        self,
        split: Glue | Table,
        examples: LabelledTexts,
        tokenizer: PreTrainedTokenizerBase,
        config: Config,
        scoring: bool,
    ) -> ClassSequences:
        return class_sequences(examples, tokenizer, config.corpus.sequence_length, "corpus.sequence_length")

    def collator(self, sequences: ClassSequences) -> classes.Classes:
        return classes.Classes(sequences)

    def evaluation_set(
        self, name: str, split: Glue | Table, examples: LabelledTexts, sequences: ClassSequences
    ) -> ClassSet:
        data = class_set(name, examples, sequences, split.measures)
        if impossible := impossible_measures(data):
            raise SettingError(
                f"{_label_setting(f'evaluate.sources.{name}', split)}: {data.description}, all with one text or one "
                f"label, so no model has a value of {' or '.join(impossible)} there: give examples with other texts "
                f"and labels{_more('evaluate.max_sequences')}"
            )
        return replace(data, collator=self.collator(sequences))


def _label_setting(setting: str, split: Split) -> str:
    """What names the column of labels; of GLUE's tasks none does."""
    return f"{setting}.label={split.label}" if isinstance(split, Table) else setting


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
