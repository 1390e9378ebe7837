"""Masked tokens and the order of two segments, as ALBERT is trained (Lan et al. 2020)."""

from collections.abc import Iterable
from typing import Self

import numpy as np
from transformers import PreTrainedTokenizerBase

from distill.config.settings import Config, StudentConfig
from distill.data.batches import Collator
from distill.data.collate.mlm import MaskedLM, masked_lm
from distill.data.collate.mlm_sop import MaskedLMAndOrder
from distill.data.sequence_format import SequenceFormat, paired_format
from distill.evaluation.labelled import OrderPass
from distill.evaluation.measures import Pass, Scoring
from distill.models.kind import MASKED, ORDERED, ModelKind
from distill.objective.terms import Term
from distill.tasks.mlm import Mlm, scoring_masks


class MlmSop(Mlm):
    """Masked tokens on sequences of two segments; their order too, where a term of the objective uses it.

    Without such a term segments are not swapped, and models have no head for their order.
    """

    labels = ("mlm", "sop")

    def __init__(self, order: bool = False, order_is_soft: bool = False) -> None:
        """
        Args:
            order: whether models predict the order of segments.
            order_is_soft: whether a term uses the teacher's probabilities of either order.
        """
        self.kind = ORDERED if order else MASKED
        self.order_is_soft = order_is_soft

    @classmethod
    def of(cls, terms: Iterable[Term]) -> Self:
        on_order = [term for term in terms if term.task == "sop"]
        return cls(bool(on_order), any(term.needs_teacher for term in on_order))

    def teacher_kind(self, student: StudentConfig) -> ModelKind:
        """A teacher needs no such head itself to give soft targets for tokens alone, but its layers come with it."""
        return self.kind if self.order_is_soft or student.from_layers else MASKED

    def sequence_format(self, tokenizer: PreTrainedTokenizerBase) -> SequenceFormat:
        return paired_format(tokenizer)

    def collator(self, config: Config, tokenizer: PreTrainedTokenizerBase, counts: np.ndarray) -> Collator:
        masking = masked_lm(config.objective.masking, tokenizer, counts)
        return self._paired(masking, tokenizer, swaps=self.kind is ORDERED)

    def scoring_collator(self, config: Config, tokenizer: PreTrainedTokenizerBase) -> Collator:
        """Tokens are scored on segments in their order, whether their order is learned or not."""
        return self._paired(scoring_masks(tokenizer), tokenizer, swaps=False)

    def passes(self, scoring: Scoring) -> list[Pass]:
        return [*super().passes(scoring), *([OrderPass(scoring)] if self.kind is ORDERED else [])]

    def _paired(self, masking: MaskedLM, tokenizer: PreTrainedTokenizerBase, swaps: bool) -> MaskedLMAndOrder:
        separator = paired_format(tokenizer).separator
        assert separator is not None
        return MaskedLMAndOrder(masking, separator, swaps)
