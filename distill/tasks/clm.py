"""Causal language modelling: every token is predicted from those before it."""

import numpy as np
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from distill.config.settings import Config, CorpusConfig, DataConfig
from distill.data import new_tokenizer
from distill.data.collate.clm import CausalLM, causal_lm
from distill.data.sequence_format import SequenceFormat, causal_format
from distill.evaluation.measures import Pass, Scoring
from distill.evaluation.perplexity import WindowPass
from distill.models.kind import CAUSAL, ModelKind
from distill.tasks._text import TextTask


class Clm(TextTask):
    """Targets shifted by one, documents of a sequence kept apart; perplexity by a sliding window, and bits per byte."""

    kind: ModelKind = CAUSAL
    labels: tuple[str, ...] = ("clm",)

    def sequence_format(self, tokenizer: PreTrainedTokenizerBase) -> SequenceFormat:
        return causal_format(tokenizer)

    def new_tokenizer(self, corpus: CorpusConfig, data: DataConfig) -> PreTrainedTokenizerFast:
        return new_tokenizer.byte_bpe(corpus, data)

    def collator(self, config: Config, tokenizer: PreTrainedTokenizerBase, counts: np.ndarray) -> CausalLM:
        return self.scoring_collator(config, tokenizer)

    def scoring_collator(self, config: Config, tokenizer: PreTrainedTokenizerBase) -> CausalLM:
        return causal_lm(tokenizer, config.corpus.cross_documents)

    def passes(self, scoring: Scoring) -> list[Pass]:
        return [WindowPass(scoring)]
