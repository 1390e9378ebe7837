"""Pseudo-perplexity: every scored token masked by itself (Salazar et al. 2020, "Masked Language Model Scoring").

Shapes: R sequences, S positions, B copies of them with one position masked each, V vocabulary.
"""

from collections.abc import Callable, Iterator
from itertools import pairwise

import numpy as np

from distill.data.collate.mlm import MaskedLM
from distill.data.collate.mlm_sop import MaskedLMAndOrder
from distill.evaluation.masked_copies import Copies, head_rows_at_masks
from distill.evaluation.measures import Measure, ProgressCallback, Scoring, SetScores
from distill.evaluation.perplexity import TokenPass, Tokens
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
    batch_setting = "pseudo_perplexity.batch_size"

    def __init__(self, scoring: Scoring) -> None:
        super().__init__(scoring, (PSEUDO_PERPLEXITY,), {})
        self.pairs = scoring.collator if isinstance(scoring.collator, MaskedLMAndOrder) else None
        masking = scoring.collator if self.pairs is None else self.pairs.masking
        assert isinstance(masking, MaskedLM)
        self.masking = masking

    def size(self, data: EvaluationSet) -> int:
        return len(self.positions(data))

    def positions(self, data: EvaluationSet) -> np.ndarray:
        """The flat positions of `data.sequences` that are scored, [N] int64."""
        fraction = self.scoring.settings.fraction_of(data.name)
        maskable = np.flatnonzero(self.masking.maskable[data.sequences].reshape(-1))
        draws = uniform(key(SEED, "pseudo-perplexity", maskable))
        is_scored = draws < fraction
        if fraction > 0 and not is_scored.any():
            is_scored[np.argsort(draws)[:LEAST]] = True
        return maskable[is_scored]

    def score(self, model: LanguageModel, data: EvaluationSet, on_progress: ProgressCallback) -> SetScores:
        # One context around all: autocast then casts a trained weight once, not in each forward.
        with autocast(model.precision, self.scoring.ranks.device):
            return super().score(model, data, on_progress)

    def tokens(self, model: LanguageModel, data: EvaluationSet, on_progress: ProgressCallback) -> Iterator[Tokens]:
        for copies, sequences in self._copies(data, on_progress):
            # Only the masked position reaches the vocabulary-sized head.
            targets = copies.sequences[copies.row, copies.column]
            yield Tokens(head_rows_at_masks(model, copies), targets, self.scoring.tensor(sequences))

    def largest_batch(self, data: EvaluationSet) -> tuple[int, Callable[[LanguageModel], object]]:
        """The first batch of this rank, which is of the longest sequences; a rank may have none."""
        copies, _ = next(self._copies(data, lambda _: None), (None, None))
        if copies is None:
            return 0, lambda model: None

        def compute(model: LanguageModel) -> None:
            with autocast(model.precision, self.scoring.ranks.device):
                model.logits(head_rows_at_masks(model, copies), self.scoring.vocab)

        return len(copies.row) * copies.sequences.shape[1], compute

    def _copies(self, data: EvaluationSet, on_progress: ProgressCallback) -> Iterator[tuple[Copies, np.ndarray]]:
        """This rank's batches of copies, of alike length, longest first, each with the numbers of its sequences [B].

        A batch holds `batch_size` copies, fewer of sequences longer than 128: the memory is bounded.
        """
        ranks, tensor, pad = self.scoring.ranks, self.scoring.tensor, self.masking.pad_id
        width = data.sequences.shape[1]
        lengths = (data.sequences != pad).sum(1)
        positions = self.positions(data)
        # Copies of one sequence stay side by side, and so share what can be computed once per sequence.
        positions = positions[np.argsort(-lengths[positions // width], kind="stable")]
        batch_size = self.scoring.settings.pseudo_perplexity.batch_size
        sizes = batch_size * COPY // np.maximum(lengths[positions // width], COPY)
        starts = [0]
        while starts[-1] < len(positions):
            starts.append(starts[-1] + max(int(sizes[starts[-1]]), 1))
        for start, end in list(pairwise(starts))[ranks.rank :: ranks.size]:
            numbers, row = np.unique(positions[start:end] // width, return_inverse=True)
            column = positions[start:end] % width
            ids = data.sequences[numbers, : lengths[numbers].max()].astype(np.int64)
            valid = None if (ids != pad).all() else tensor(ids != pad)
            segments = None if self.pairs is None else tensor(self.pairs.segments(ids))
            yield Copies(tensor(ids), valid, tensor(row), tensor(column), self.masking.mask_id, segments), numbers[row]
            on_progress(len(row))
