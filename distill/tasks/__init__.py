"""Tasks: what models learn to predict. One file each, found by its name, which holds all that differs between them."""

import importlib
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import TYPE_CHECKING, Self

import numpy as np
from transformers import PreTrainedTokenizerBase

from distill.component import class_name, kinds
from distill.config import Config, CorpusConfig, EvaluateConfig
from distill.data.batches import Collator
from distill.data.row_format import RowFormat
from distill.errors import SettingError
from distill.evaluation.measures import Measure, Scoring
from distill.models.kind import ModelKind
from distill.objective.terms import Term

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


class Task(ABC):
    """How text becomes micro-batches for a kind of language model, and how a model is scored.

    Attributes:
        kind: the models that it trains.
        labels: what is predicted in its batches, by the names in `Batch.labels`; the tokens come first.
    """

    kind: ModelKind
    labels: tuple[str, ...]

    @classmethod
    def of(cls, terms: Iterable[Term]) -> Self:
        """The task for an objective of these terms, which in some tasks decide what batches hold."""
        return cls()

    def teacher_kind(self, student: str) -> ModelKind:
        """The models that it takes for teachers, for a student of this kind (`student.kind`)."""
        return self.kind

    @abstractmethod
    def row_format(self, tokenizer: PreTrainedTokenizerBase) -> RowFormat:
        """What surrounds text in a row. Raises SettingError where the tokenizer lacks a token for that."""

    @abstractmethod
    def new_tokenizer(self, corpus: CorpusConfig) -> "PreTrainedTokenizerFast":
        """A tokenizer trained on the corpus, for a pair that brings none."""

    @abstractmethod
    def collator(self, config: Config, tokenizer: PreTrainedTokenizerBase, counts: np.ndarray) -> Collator:
        """What makes the micro-batches of training; `counts` [V]: how often each token occurs in the corpus."""

    @abstractmethod
    def scoring_collator(self, config: Config, tokenizer: PreTrainedTokenizerBase, counts: np.ndarray) -> Collator:
        """What makes the micro-batches of evaluation, which no setting changes: runs stay comparable."""

    @abstractmethod
    def measures(self, scoring: Scoring, settings: EvaluateConfig, tokenizer: PreTrainedTokenizerBase) -> list[Measure]:
        """How models are scored; the first of them says which of two models is better."""


def find_task(name: str, terms: Iterable[Term] = ()) -> Task:
    """The task that `objective.task` names, for an objective of these terms.

    Raises:
        SettingError: there is no such file in this package.
    """
    if name not in (known := kinds(__name__)):
        raise SettingError(f"objective.task={name} is not known: choose one of {', '.join(known)}")
    task = getattr(importlib.import_module(f"{__name__}.{name}"), class_name(name)).of(terms)
    assert isinstance(task, Task)
    return task


def task_of(label: str) -> str:
    """The first of the tasks, by name, in whose batches this is predicted; the label itself where there is none."""
    return next((name for name in kinds(__name__) if label in find_task(name).labels), label)
