"""Tasks whose targets come from labelled examples: models are fine-tuned on the rows of a table.

Beside these there may be unlabelled ones, which only the terms with a teacher learn from: the task-specific stage of
TinyBERT (Jiao et al. 2020) on further text, as in the distillation of Turc et al. (2019, arXiv:1908.08962).
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from distill.config.settings import Config, CorpusConfig, DataConfig
from distill.data.batches import Collator
from distill.data.sequence_store import sample_numbers
from distill.data.tables import Split
from distill.data.tokens import Tokens
from distill.data.unknown_tokens import check_unknown
from distill.distributed import Ranks
from distill.evaluation.labelled import TablePass
from distill.evaluation.measures import Pass, Scoring
from distill.evaluation.sets import EvaluationSet, source_of
from distill.runtime.errors import SettingError
from distill.runtime.progress import counted
from distill.tasks import Prepared, Task, make_batches


@dataclass(frozen=True)
class LabelledData:
    """The examples that a task learns from."""

    split: Split  # where they were read
    examples: Any  # the labelled ones
    unlabelled: Any | None = None  # those that a teacher labels, in the same form
    is_learnt: bool = True  # False: examples of a set, on which models are only scored

    def describe(self) -> str:
        """In words, how many there are and where they come from."""
        if self.unlabelled is None:
            return str(self.examples.describe())
        counts = f"{len(self.examples):,} labelled and {len(self.unlabelled):,} unlabelled examples"
        return f"{counts}: {self.examples.describe()}; {self.unlabelled.describe()}"


class TableTask(Task):
    """How labelled examples become micro-batches.

    Attributes:
        noun: what such examples are, for messages.
        corpora: options of the group `corpus` that hold such examples.
    """

    noun: ClassVar[str]
    corpora: ClassVar[tuple[str, ...]]

    def __init__(self, data: LabelledData | None = None) -> None:
        """`data`: None before `read`, when only the kind of the task is asked for."""
        self._data = data

    @property
    def data(self) -> LabelledData:
        """The examples that `read` has read."""
        assert self._data is not None, "read comes first"
        return self._data

    def read(self, config: Config, training: bool = True) -> Self:
        if not training:  # examples of the first set stand in, whose form all sets have
            if not config.evaluate.sets:
                raise SettingError("evaluate.sets=[] names no set: name one that has a source in evaluate.sources")
            split, setting = self._split_of_set(config.evaluate.sets[0], config)
            return type(self)(LabelledData(split, split.read(setting, training=False), is_learnt=False))
        split, unlabelled = self._split(config.corpus, "corpus"), None
        examples = _some(split.read("corpus", training=True), config.corpus.max_sequences, "training examples")
        if config.corpus.unlabelled is not None:
            unlabelled = split.read_unlabelled(config.corpus.unlabelled, "corpus.unlabelled")
        return type(self)(LabelledData(split, examples, unlabelled))

    def new_tokenizer(self, corpus: CorpusConfig, data: DataConfig) -> PreTrainedTokenizerFast:
        raise SettingError(
            "student.tokenizer=null, and there is no model to take one from: give student.path of a pre-trained model, "
            "or the folder of a tokenizer"
        )

    def prepare(self, config: Config, tokenizer: PreTrainedTokenizerBase, ranks: Ranks) -> Prepared:
        data = self.data
        sequences = self.sequences(data.split, data.examples, tokenizer, config, "corpus")
        if data.unlabelled is not None:
            others = self.sequences(data.split, data.unlabelled, tokenizer, config, "corpus")
            sequences = sequences.with_unlabelled(others)
        tokens = Tokens(
            sequences=sequences.sequences,
            counts=_checked_counts(sequences, tokenizer, config, "corpus"),
            digest=sequences.digest,
            name=data.describe(),
            documents=len(data.examples) + len(data.unlabelled or ()),
            tokens=int((sequences.sequences != sequences.pad_id).sum()),
            seconds=0.0,
            tokens_per_second=0.0,
            left_out={},
            unit="example",
        )
        batches = make_batches(config, sequences.sequences, self.collator(sequences), ranks)
        return Prepared(tokens, batches, *self.evaluation_sets(config, tokenizer))

    def evaluation_sets(
        self, config: Config, tokenizer: PreTrainedTokenizerBase
    ) -> tuple[list[EvaluationSet], list[str]]:
        return [self._set(name, config, tokenizer) for name in config.evaluate.sets], []

    def scoring(
        self, config: Config, tokenizer: PreTrainedTokenizerBase, sets: Sequence[EvaluationSet], ranks: Ranks
    ) -> Scoring:
        """Each set has a collator of its own, which alone fits its sequences."""
        collator: Any = next((data.collator for data in sets if data.collator is not None), None)
        return Scoring(collator, tokenizer, config.evaluate, ranks, sets, self.kind.heads)

    def passes(self, scoring: Scoring) -> list[Pass]:
        return [TablePass(scoring)]

    @abstractmethod
    def sequences(
        self, split: Any, examples: Any, tokenizer: PreTrainedTokenizerBase, config: Config, setting: str
    ) -> Any:
        """The examples as sequences; those of an evaluation set with what turns outputs into scores.

        Args:
            setting: what error lines call the settings of `split`: `corpus`, or `evaluate.sources.NAME`.
        """

    @abstractmethod
    def collator(self, sequences: Any) -> Collator:
        """What makes micro-batches of just these sequences."""

    @abstractmethod
    def evaluation_set(self, name: str, split: Any, examples: Any, sequences: Any) -> EvaluationSet:
        """Sequences to score."""

    def _set(self, name: str, config: Config, tokenizer: PreTrainedTokenizerBase) -> EvaluationSet:
        split, setting = self._split_of_set(name, config)
        examples = split.read(setting, training=False, like=self.data.examples)
        examples = _some(examples, config.evaluate.max_sequences_of(name), f"examples of {name}")
        if self.data.is_learnt:
            self._refuse_learnt(setting, split, examples)
        sequences = self.sequences(split, examples, tokenizer, config, setting)
        _checked_counts(sequences, tokenizer, config, f"evaluate.sets: {name}")
        return self.evaluation_set(name, split, examples, sequences)

    def _refuse_learnt(self, setting: str, split: Split, examples: Any) -> None:
        """Raises SettingError where examples that are to be scored are those that a student learns from."""
        data = self.data
        shared = len({*examples.texts} & {*data.examples.texts})
        are_files = split.path is not None and data.split.path is not None  # a program may score what it trains on
        if are_files and split.split != data.split.split and shared > min(len(examples), len(data.examples)) / 2:
            raise SettingError(
                f"{setting} holds {counted(shared, 'example')} that the student is trained on: give {setting}.path of "
                "others, or files called train and validation in one folder"
            )
        if data.unlabelled is not None and {*examples.texts} <= {*data.unlabelled.texts}:
            raise SettingError(
                f"{setting} has only texts that corpus.unlabelled is trained on too: keep those that are scored apart"
            )

    def _split_of_set(self, name: str, config: Config) -> tuple[Split, str]:
        """The examples of an evaluation set, and what error lines call its settings."""
        return self._split(source_of(name, config), f"evaluate.sources.{name}"), f"evaluate.sources.{name}"

    def _split(self, source: Any, setting: str) -> Split:
        make = source.made_by
        split = None if make is None else make()
        modules = {kind.__module__.rpartition(".")[2] for kind in type(split).__mro__}
        if not isinstance(split, Split) or not modules.intersection(self.corpora):
            kind = source.kind if source.target is None else source.target
            raise SettingError(
                f"{setting}.kind={kind} holds no {self.noun}, which this objective learns: choose one of "
                f"{', '.join(self.corpora)}"
            )
        return split


def _checked_counts(sequences: Any, tokenizer: PreTrainedTokenizerBase, config: Config, setting: str) -> np.ndarray:
    """[V] how often each token occurs in the sequences. Raises SettingError where too many are the unknown one."""
    counts = np.bincount(sequences.sequences.reshape(-1), minlength=len(tokenizer))[: len(tokenizer)]
    check_unknown(
        counts, int((sequences.sequences != sequences.pad_id).sum()), tokenizer, config.corpus.max_unknown, setting
    )
    return counts


def _some(examples: Any, max_examples: int | None, purpose: str) -> Any:
    """At most so many of the examples, a seeded choice."""
    numbers = sample_numbers(len(examples), max_examples, purpose)
    return examples if numbers is None else examples.take(numbers)
