"""Masked language modelling: some tokens of a sequence are hidden and predicted from both sides."""

import numpy as np
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from distill.config.settings import Config, CorpusConfig, DataConfig
from distill.data import new_tokenizer
from distill.data.batches import Collator
from distill.data.collate.mlm import MaskedLM, masked_lm
from distill.data.sequence_format import SequenceFormat, masked_format
from distill.evaluation.measures import Pass, Scoring
from distill.evaluation.perplexity import MaskPass
from distill.evaluation.pseudo_perplexity import SinglePass
from distill.evaluation.sets import MASKING
from distill.models.kind import MASKED, ModelKind
from distill.tasks._text import TextTask


class Mlm(TextTask):
    """Masks drawn anew in every epoch; perplexity at a fixed mask, and pseudo-perplexity."""

    kind: ModelKind = MASKED
    labels: tuple[str, ...] = ("mlm",)

    def sequence_format(self, tokenizer: PreTrainedTokenizerBase) -> SequenceFormat:
        return masked_format(tokenizer)

    def new_tokenizer(self, corpus: CorpusConfig, data: DataConfig) -> PreTrainedTokenizerFast:
        return new_tokenizer.wordpiece(corpus, data)

    def collator(self, config: Config, tokenizer: PreTrainedTokenizerBase, counts: np.ndarray) -> Collator:
        return masked_lm(config.objective.masking, tokenizer, counts)

    def scoring_collator(self, config: Config, tokenizer: PreTrainedTokenizerBase) -> Collator:
        return scoring_masks(tokenizer)

    def passes(self, scoring: Scoring) -> list[Pass]:
        return [MaskPass(scoring), *([SinglePass(scoring)] if scoring.settings.scores_singly else [])]


def scoring_masks(tokenizer: PreTrainedTokenizerBase) -> MaskedLM:
    """The masks of evaluation, which choose all tokens alike, whatever the counts of each."""
    return masked_lm(MASKING, tokenizer, np.zeros(len(tokenizer), np.int64))
