"""Classes and values of texts: fine-tuning on GLUE and on tables of the user's."""

from dataclasses import replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from distill.config.settings import Config
from distill.data.class_sequences import ClassSequences, class_sequences
from distill.data.collate import classes
from distill.data.tables import LabelledTexts
from distill.data.tables.glue import Glue
from distill.data.tables.table import Table
from distill.evaluation.measures.classes import ClassSet, class_set
from distill.models.kind import CLASSES, ModelKind
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
        return classes.Classes(sequences, segments=True)

    def evaluation_set(
        self, name: str, split: Glue | Table, examples: LabelledTexts, sequences: ClassSequences
    ) -> ClassSet:
        return replace(class_set(name, examples, sequences, split.measures), collator=self.collator(sequences))


def _head_fields(names: tuple[str, ...]) -> dict[str, Any]:
    """What a model's configuration has of its head; without names of classes that predicts a value."""
    outputs = names or ("value",)
    return {
        "id2label": dict(enumerate(outputs)),
        "label2id": {name: number for number, name in enumerate(outputs)},
        "problem_type": "single_label_classification" if names else "regression",
    }
