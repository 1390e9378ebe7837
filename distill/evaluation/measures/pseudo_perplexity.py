"""Pseudo-perplexity: every scored token masked by itself (Salazar et al. 2020, "Masked Language Model Scoring").

Shapes: R sequences, S positions, B copies of them with one position masked each.
"""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise

import numpy as np
import torch

from distill.data.collate.mlm import MaskedLM
from distill.data.collate.mlm_sop import MaskedLMAndOrder
from distill.evaluation.measures import NO_BYPRODUCTS, Byproducts, Measure, ProgressCallback, Scoring, Trial
from distill.evaluation.measures.masked_copies import Copies, head_rows_at_masks
from distill.evaluation.measures.over_ranks import sum_exchange
from distill.evaluation.measures.perplexity import Part, Perplexity, TokenPass
from distill.evaluation.sets import SEED, EvaluationSet
from distill.models.language_model import LanguageModel
from distill.models.precision import autocast
from distill.runtime.seed import key, uniform

PSEUDO_PERPLEXITY = Measure(
    "pseudo_perplexity", "Pseudo-perplexity", "the same with each scored token masked by itself"
)
LEAST = 16  # positions of a text so short that the fraction draws none
COPY = 128  # longest copy of which `pseudo_perplexity.batch_size` are in one forward


class SinglePass(TokenPass):
    """Tokens that are masked one at a time.

    A seeded fraction of all maskable positions is scored, drawn position by position; 16 where that draws none.
    """

    unit = "positions"

    def __init__(self, scoring: Scoring) -> None:
        metric = Perplexity(PSEUDO_PERPLEXITY.name, **sum_exchange(scoring.ranks))
        super().__init__(scoring, metric, (PSEUDO_PERPLEXITY,), {})
        self.settings, self.pairs = scoring.settings.pseudo_perplexity, scoring.collator
        self.fraction_of: Callable[[str], float] = scoring.settings.fraction_of
        masking = self.pairs.masking if isinstance(self.pairs, MaskedLMAndOrder) else self.pairs
        assert isinstance(masking, MaskedLM)
        self.collator = masking

    def size(self, data: EvaluationSet) -> int:
        return len(self.positions(data))

    def num_positions(self, data: EvaluationSet) -> int:
        return self.size(data)

    def applies_to(self, data: EvaluationSet) -> bool:
        return self.fraction_of(data.name) > 0

    def has_positions(self, data: EvaluationSet) -> bool:
        return self.size(data) > 0

    def positions(self, data: EvaluationSet) -> np.ndarray:
        """The flat positions of `data.sequences` that are scored, [N] int64."""
        maskable = np.flatnonzero(self.collator.maskable[data.sequences].reshape(-1))
        draws = uniform(key(SEED, "pseudo-perplexity", maskable))
        positions = maskable[draws < self.fraction_of(data.name)]
        if len(positions) or not self.applies_to(data):
            return positions
        return np.sort(maskable[np.argsort(draws)[:LEAST]])

    def score(
        self,
        model: LanguageModel,
        data: EvaluationSet,
        on_progress: ProgressCallback,
        byproducts: Byproducts = NO_BYPRODUCTS,
    ) -> dict[str, float]:
        # One context around all: autocast then casts a trained weight once, not in each forward.
        with autocast(model.precision, self.scoring.ranks.device):
            return super().score(model, data, on_progress, byproducts)

    def parts(self, model: LanguageModel, data: EvaluationSet, on_progress: ProgressCallback) -> Iterator[Part]:
        for copies, targets, sequences in self._copies(data, on_progress):
            # Only the masked position reaches the vocabulary-sized head.
            yield Part(head_rows_at_masks(model, copies), targets, self.scoring.tensor(sequences))

    def trial(self, data: EvaluationSet) -> Trial:
        """The first batch of this rank, which is of the longest sequences; a rank may have none."""
        copies = next((copies for copies, _, _ in self._copies(data, lambda _: None)), None)
        setting, value = "evaluate.pseudo_perplexity.batch_size", self.settings.batch_size
        if copies is None:
            return Trial(lambda model: None, 0, setting, value)
        return Trial(partial(self.logits, copies=copies), len(copies.row) * copies.sequences.shape[1], setting, value)

    def logits(self, model: LanguageModel, copies: Copies) -> torch.Tensor:
        """The logits of one batch, [B, V]."""
        with autocast(model.precision, self.scoring.ranks.device):
            return model.logits(head_rows_at_masks(model, copies), self.scoring.vocab)

    def _copies(
        self, data: EvaluationSet, on_progress: ProgressCallback
    ) -> Iterator[tuple[Copies, torch.Tensor, np.ndarray]]:
        """This rank's batches of copies, of alike length, longest first; each with the tokens [B] and sequences [B].

        The tokens are those that the masks hide.

        A batch holds `batch_size` copies, fewer of sequences longer than 128: the memory is bounded.
        """
        collator, ranks, tensor = self.collator, self.scoring.ranks, self.scoring.tensor
        width = data.sequences.shape[1]
        lengths = (data.sequences != collator.pad_id).sum(1)
        positions = self.positions(data)
        # Copies of one sequence stay side by side, and so share what can be computed once per sequence.
        positions = positions[np.argsort(-lengths[positions // width], kind="stable")]
        sizes = self.settings.batch_size * COPY // np.maximum(lengths[positions // width], COPY)
        starts = [0]
        while starts[-1] < len(positions):
            starts.append(starts[-1] + max(int(sizes[starts[-1]]), 1))
        for start, end in list(pairwise(starts))[ranks.rank :: ranks.size]:
            numbers, row = np.unique(positions[start:end] // width, return_inverse=True)
            column = positions[start:end] % width
            ids = data.sequences[numbers, : lengths[numbers].max()].astype(np.int64)
            valid = None if (ids != collator.pad_id).all() else tensor(ids != collator.pad_id)
            segments = tensor(self.pairs.segments(ids)) if isinstance(self.pairs, MaskedLMAndOrder) else None
            copies = Copies(tensor(ids), valid, tensor(row), tensor(column), collator.mask_id, segments)
            yield copies, tensor(ids[row, column]), numbers[row]
            on_progress(len(row))
