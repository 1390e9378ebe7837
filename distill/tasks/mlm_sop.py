"""Masked words and the order of two segments, as ALBERT is trained (Lan et al. 2020)."""

from collections.abc import Iterable
from typing import Self

import numpy as np
from transformers import PreTrainedTokenizerBase

from distill.config.settings import Config, LayersStudentConfig, StudentConfig
from distill.data.batches import Collator
from distill.data.collate.mlm import MaskedLM, masked_lm
from distill.data.collate.mlm_sop import MaskedLMAndOrder
from distill.data.row_format import RowFormat, paired_rows
from distill.evaluation.measures import Pass, Scoring
from distill.models.kind import MASKED, ORDERED, ModelKind
from distill.objective.terms import Term
from distill.tasks.mlm import Mlm, scoring_masks


class MlmSop(Mlm):
    """Masked words on rows of two segments; their order too, where a term of the objective wants it.

    Without such a term segments are not swapped, and models have no head for their order.
    """

    labels = ("mlm", "sop")

    order_is_soft = False  # whether a term wants the teacher's probabilities of either order

    @classmethod
    def of(cls, terms: Iterable[Term]) -> Self:
        task, on_order = cls(), [term for term in terms if term.task == "sop"]
        task.kind = ORDERED if on_order else MASKED
        task.order_is_soft = any(term.needs_teacher for term in on_order)
        return task

    def teacher_kind(self, student: StudentConfig) -> ModelKind:
        """A teacher needs no such head itself to give soft targets for words alone, but its layers come with it."""
        return self.kind if self.order_is_soft or isinstance(student, LayersStudentConfig) else MASKED

    def row_format(self, tokenizer: PreTrainedTokenizerBase) -> RowFormat:
        return paired_rows(tokenizer)

    def collator(self, config: Config, tokenizer: PreTrainedTokenizerBase, counts: np.ndarray) -> Collator:
        words = masked_lm(config.objective.masking, tokenizer, counts)
        return self._paired(words, tokenizer, swaps=self.kind is ORDERED)

    def scoring_collator(self, config: Config, tokenizer: PreTrainedTokenizerBase) -> Collator:
        """Words are scored on segments in their order, whether their order is learned or not."""
        return self._paired(scoring_masks(tokenizer), tokenizer, swaps=False)

    def passes(self, scoring: Scoring) -> list[Pass]:
        from distill.evaluation.measures.order_accuracy import OrderPass

        return [*super().passes(scoring), *([OrderPass(scoring)] if self.kind is ORDERED else [])]

    def _paired(self, words: MaskedLM, tokenizer: PreTrainedTokenizerBase, swaps: bool) -> MaskedLMAndOrder:
        separator = paired_rows(tokenizer).separator
        assert separator is not None
        return MaskedLMAndOrder(words, separator, swaps)
