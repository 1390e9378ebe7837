"""Tasks whose targets come from the text itself: sequences with tokens that are to be predicted."""

from abc import abstractmethod
from collections.abc import Sequence

import numpy as np
from transformers import PreTrainedTokenizerBase

from distill.config.settings import Config
from distill.data.batches import Collator
from distill.data.order import Mixture
from distill.data.sequence_format import SequenceFormat
from distill.data.sequence_store import subsample
from distill.data.tokens import corpus_text, prepare, prepare_mixture
from distill.data.unknown_tokens import check_unknown
from distill.distributed import Ranks
from distill.evaluation.measures import Scoring
from distill.evaluation.sets import EvaluationSet, load_sets
from distill.tasks import Prepared, Task, make_batches


class TextTask(Task):
    """How text becomes micro-batches for a kind of language model."""

    @abstractmethod
    def sequence_format(self, tokenizer: PreTrainedTokenizerBase) -> SequenceFormat:
        """What surrounds text in a sequence. Raises SettingError where the tokenizer lacks a token for that."""

    @abstractmethod
    def collator(self, config: Config, tokenizer: PreTrainedTokenizerBase, counts: np.ndarray) -> Collator:
        """What makes the micro-batches of training; `counts` [V]: how often each token occurs in the corpus."""

    @abstractmethod
    def scoring_collator(self, config: Config, tokenizer: PreTrainedTokenizerBase) -> Collator:
        """What makes the micro-batches of evaluation, which no setting changes: runs stay comparable."""

    def prepare(self, config: Config, tokenizer: PreTrainedTokenizerBase, ranks: Ranks) -> Prepared:
        corpus, data = config.corpus, config.data
        order: Mixture | None = None
        if corpus.sources:
            tokens, sequences, order = prepare_mixture(corpus, data, tokenizer, self.sequence_format, config.seed)
        else:
            tokens = prepare(corpus_text(corpus, data), tokenizer, corpus, data, "train", self.sequence_format)
            sequences = subsample(tokens.sequences, corpus.max_sequences, "training rows", data.shuffle_bytes)
        # Of a mixture a source that does not fit the vocabulary would hide among the others.
        sources = {f"corpus.sources.{name}": part for name, part in tokens.sources.items()}
        for setting, part in {"corpus": tokens, **sources}.items():
            check_unknown(part.counts, part.tokens, tokenizer, corpus.max_unknown, setting)
        batches = make_batches(config, sequences, self.collator(config, tokenizer, tokens.counts), ranks, order)
        return Prepared(tokens, batches, *self.evaluation_sets(config, tokenizer))

    def evaluation_sets(
        self, config: Config, tokenizer: PreTrainedTokenizerBase
    ) -> tuple[list[EvaluationSet], list[str]]:
        return load_sets(config, tokenizer, self.sequence_format)

    def scoring(
        self, config: Config, tokenizer: PreTrainedTokenizerBase, sets: Sequence[EvaluationSet], ranks: Ranks
    ) -> Scoring:
        return Scoring(self.scoring_collator(config, tokenizer), tokenizer, config.evaluate, ranks, sets)
