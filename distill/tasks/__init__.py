"""Tasks: what models learn to predict. One file each, found by its name, which holds all that differs between them."""

import importlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from distill.config.component import class_name, kinds
from distill.config.settings import Config, CorpusConfig, DataConfig, StudentConfig
from distill.data.batches import Batches, Collator, StepShape, num_threads
from distill.data.order import Mixture, order_of
from distill.data.sequence_store import SequenceStore
from distill.data.tokens import Tokens
from distill.distributed import Ranks
from distill.evaluation.evaluator import Evaluator
from distill.evaluation.measures import Pass, Scoring, require_positions
from distill.evaluation.sets import EvaluationSet
from distill.models.kind import ModelKind
from distill.objective.terms import Term
from distill.runtime.errors import SettingError, did_you_mean


@dataclass
class Prepared:
    """The training sequences of a run, and the sets that models are scored on."""

    tokens: Tokens
    batches: Batches  # of this rank, in their order and with their targets
    sets: list[EvaluationSet]
    left_out: list[str]  # a line for each set that is not available


class Task(ABC):
    """What becomes micro-batches for a kind of model, and how a model is scored.

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

    def teacher_kind(self, student: StudentConfig) -> ModelKind:
        """The models that it takes for teachers, for such a student."""
        return self.kind

    def read(self, config: Config, training: bool = True) -> Self:
        """The task with what decides which models are wanted, such as the classes of labelled examples.

        Args:
            training: False where models are only scored: then the examples of the evaluation sets decide.
        """
        return self

    @abstractmethod
    def new_tokenizer(self, corpus: CorpusConfig, data: DataConfig) -> PreTrainedTokenizerFast:
        """A tokenizer trained on the corpus, for a pair that brings none."""

    @abstractmethod
    def prepare(self, config: Config, tokenizer: PreTrainedTokenizerBase, ranks: Ranks) -> Prepared:
        """What a run learns from and is scored on. Raises SettingError where it is not available or does not fit."""

    @abstractmethod
    def evaluation_sets(
        self, config: Config, tokenizer: PreTrainedTokenizerBase
    ) -> tuple[list[EvaluationSet], list[str]]:
        """The sets that models are scored on, and a line for each that is not available and may be left out."""

    @abstractmethod
    def scoring(
        self, config: Config, tokenizer: PreTrainedTokenizerBase, sets: Sequence[EvaluationSet], ranks: Ranks
    ) -> Scoring:
        """What the passes over these sets have in common."""

    @abstractmethod
    def passes(self, scoring: Scoring) -> list[Pass]:
        """How models are scored; the first measure of the first pass decides which of two models is better."""

    def evaluator(
        self, config: Config, tokenizer: PreTrainedTokenizerBase, sets: Sequence[EvaluationSet], ranks: Ranks
    ) -> Evaluator:
        """What scores models on these sets."""
        scoring = self.scoring(config, tokenizer, sets, ranks)
        passes = self.passes(scoring)
        if not scoring.heads:
            require_positions(passes[0].measures[0], scoring)
        return Evaluator(scoring, passes, config.precision)


def make_batches(
    config: Config, sequences: SequenceStore, collator: Collator, ranks: Ranks, mixture: Mixture | None = None
) -> Batches:
    """This rank's part of the sequences [N, S] in their order; None: shuffled, as a whole or in windows."""
    order = order_of(sequences, config.data.shuffle_bytes, config.seed) if mixture is None else mixture
    train = config.train
    shape = StepShape(train.batch_size, train.sequences(ranks.size), ranks.rank, ranks.size, ranks.equal_windows)
    threads = num_threads(train.workers, ranks.local_size)
    return Batches(sequences, collator, order, shape, config.seed, config.objective.masking.static, threads)


def find_task(name: str, terms: Iterable[Term] = ()) -> Task:
    """The task that `objective.task` names, for an objective of these terms."""
    if name not in (tasks := kinds(__name__)):
        raise SettingError(
            f"objective.task={name} is not known{did_you_mean(name, tasks)}: choose one of {', '.join(tasks)}"
        )
    task = getattr(importlib.import_module(f"{__name__}.{name}"), class_name(name)).of(terms)
    assert isinstance(task, Task)
    return task


def task_of(label: str) -> str:
    """The first of the tasks, by name, in whose batches this is predicted; the label itself where there is none."""
    return next((name for name in kinds(__name__) if label in find_task(name).labels), label)
