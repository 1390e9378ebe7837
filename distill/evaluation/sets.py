"""Evaluation sets: sequences of token ids under the name by which the report calls them."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Self, TypedDict

import numpy as np
from transformers import PreTrainedTokenizerBase

from distill.config.settings import Config, MaskingConfig, Missing, SourceConfig
from distill.data.batches import Collator
from distill.data.sequence_format import SequenceFormatOf, masked_format
from distill.data.sequence_store import SequenceStore, choose_sequences, sequence_bytes
from distill.data.tokens import Tokens, corpus_texts, heldout_text, prepare, set_text
from distill.data.unknown_tokens import check_unknown
from distill.runtime.errors import SettingError

# The mask of an evaluation set never changes, whatever the seed of the run: runs stay comparable.
SEED = 0
MASKING = MaskingConfig(mlm_probability=0.15, mask=0.8, keep=0.1, smoothing=0.0)
HELDOUT = "heldout"  # the kind of the set that is a part of the corpus


class NotFinite(ValueError):
    """Outputs of a model from which nothing can be read, as some of them are not finite."""


@dataclass(frozen=True)
class EvaluationSet:
    """Sequences to score."""

    name: str
    description: str
    sequences: np.ndarray  # [num_sequences, S]
    documents: int
    text: SequenceStore | None = None  # [M, S] all of the text in its order, where `sequences` are some of them
    numbers: np.ndarray | None = None  # [num_sequences] which these are
    prompts: bool = False  # whether some of its tokens are no targets
    collator: Collator | None = None  # of its sequences, where that of all sets does not fit them

    def before(self, row: int) -> np.ndarray | None:
        """The sequence of the text before a sequence of the set; None before the first one."""
        text = self.sequences if self.text is None else self.text
        number = row if self.numbers is None else int(self.numbers[row])
        return None if number == 0 else text[np.array([number - 1])][0]

    def first(self, count: int) -> Self:
        """The first `count` sequences, or all where there are fewer; what comes before one in the text stays known."""
        numbers = None if self.numbers is None else self.numbers[:count]
        text = self.sequences if self.text is None else self.text
        return replace(self, sequences=self.sequences[:count], numbers=numbers, text=text)

    @property
    def num_sequences(self) -> int:
        """How many sequences are scored."""
        return len(self.sequences)


class SetContents(TypedDict):
    """What a set holds and how much of it is scored, on all ranks, as results.json has it."""

    name: str
    description: str
    documents: int
    sequences: int
    tokens: int  # without padding
    positions: int  # that the first measure scores
    pseudo_positions: int  # that are masked one by one; 0 where that is not measured


def load_sets(
    config: Config, tokenizer: PreTrainedTokenizerBase, sequence_format: SequenceFormatOf = masked_format
) -> tuple[list[EvaluationSet], list[str]]:
    """The sets that `evaluate.sets` names, and a line for each that is not available and may be left out.

    Args:
        sequence_format: gives the format of sequences for a tokenizer.
    """
    sets, left_out = [], []
    for name, tokens in tokens_of_sets(config, tokenizer, sequence_format):
        path = f"evaluate.sources.{name}.path"
        if tokens is not None:
            chosen, numbers = _chosen(name, tokens.sequences, config)
            check_unknown(tokens.counts, tokens.tokens, tokenizer, config.corpus.max_unknown, f"evaluate.sets: {name}")
            sets.append(
                EvaluationSet(name, tokens.name, chosen, tokens.documents, tokens.sequences, numbers, tokens.prompts)
            )
        elif config.evaluate.missing is Missing.skip:
            left_out.append(
                f"The evaluation set {name} is left out: it lies neither in {path} nor under $DISTILL_DATA."
            )
        else:
            cure = f"give {path}, set DISTILL_DATA, or set evaluate.missing=skip"
            raise SettingError(f"evaluate.sets: {name} is not available; {cure}")
    return sets, left_out


def _chosen(name: str, sequences: SequenceStore, config: Config) -> tuple[np.ndarray, np.ndarray | None]:
    """The sequences of a set that are scored, in memory unless they are one file, and their numbers; None: all."""
    max_bytes = config.data.shuffle_bytes
    max_sequences = config.evaluate.max_sequences_of(name)
    numbers = choose_sequences(sequences, max_sequences, f"evaluated rows of {name}")
    if numbers is None and isinstance(sequences, np.ndarray):
        return sequences, None
    count = len(sequences) if numbers is None else len(numbers)
    if count * sequence_bytes(sequences) > max_bytes:
        of_one = f"by_set.{name}." if name in config.evaluate.by_set else ""
        raise SettingError(
            f"evaluate.{of_one}max_sequences={max_sequences}: {name} has {len(sequences):,} sequences, more than "
            f"fit into memory (data.shuffle_bytes={max_bytes}): give {max_bytes // sequence_bytes(sequences)} at most"
        )
    return sequences[np.arange(count) if numbers is None else numbers], numbers


def source_of(name: str, config: Config) -> SourceConfig:
    """The settings of the source of an evaluation set. Raises SettingError where there are none."""
    if (source := config.evaluate.sources.get(name)) is None:
        names = ", ".join(sorted(config.evaluate.sources))
        raise SettingError(f"evaluate.sets: {name} has no source; choose from {names} or add evaluate.sources.{name}")
    return source


def tokens_of_sets(
    config: Config, tokenizer: PreTrainedTokenizerBase, sequence_format: SequenceFormatOf
) -> Iterator[tuple[str, Tokens | None]]:
    """Name and sequences of each set, None where its text is not available; a mixture has a held-out set a source."""
    corpus, data = config.corpus, config.data
    for name in config.evaluate.sets:
        source = source_of(name, config)
        if source.target is None and source.kind == HELDOUT:
            for name_of_source, text in corpus_texts(corpus, data).items():
                books = heldout_text(text, data)
                part = HELDOUT if books is None else "all"
                tokens = prepare(books or text, tokenizer, corpus, data, part, sequence_format)
                yield "_".join(filter(None, (name, name_of_source))), tokens
            continue
        texts = set_text(source, f"evaluate.sources.{name}", data)
        yield name, None if texts is None else prepare(texts, tokenizer, corpus, data, "all", sequence_format)
