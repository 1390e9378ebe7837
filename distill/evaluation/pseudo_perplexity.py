"""Pseudo-perplexity: every scored token masked by itself (Salazar et al. 2020, "Masked Language Model Scoring").

Shapes: R rows, S positions, B copies of them with one position masked each.
"""

from collections.abc import Callable, Iterator
from itertools import pairwise

import numpy as np
import torch

from distill.config.settings import PseudoPerplexityConfig
from distill.data.collate.mlm import MaskedLM
from distill.data.collate.mlm_sop import MaskedLMAndOrder
from distill.evaluation.masked_copies import Copies, head_rows_at_masks
from distill.evaluation.measures import PerplexityMeter, ProgressCallback, Scoring
from distill.evaluation.row_losses import RowMeter
from distill.evaluation.sets import SEED, EvaluationSet
from distill.models.kernels.precision import autocast
from distill.models.language_model import LanguageModel
from distill.runtime.seed import key, uniform

COPY = 128  # longest copy of which `pseudo_perplexity.batch_size` are in one forward


class PseudoPerplexity:
    """exp of the mean negative log-likelihood of tokens that are masked one at a time.

    A seeded share of all maskable positions is scored, drawn position by position.
    """

    name = "pseudo_perplexity"
    title = "Pseudo-perplexity"
    explanation = "the same with each scored token masked by itself"
    lower_is_better = True
    unit = "positions"

    def __init__(
        self,
        scoring: Scoring,
        settings: PseudoPerplexityConfig,
        share_of: Callable[[str], float] | None = None,
    ) -> None:
        """`share_of`: the share of the positions of a set by its name; None: `settings.share` of every set."""
        self.scoring, self.settings, self.pairs = scoring, settings, scoring.collator
        self.share_of = share_of or (lambda name: settings.share)
        words = self.pairs.words if isinstance(self.pairs, MaskedLMAndOrder) else self.pairs
        assert isinstance(words, MaskedLM)
        self.collator = words

    def size(self, data: EvaluationSet) -> int:
        return len(self.positions(data))

    def num_positions(self, data: EvaluationSet) -> int:
        return self.size(data)

    def scores_any(self, data: EvaluationSet) -> bool:
        return self.share_of(data.name) == 0 or self.size(data) > 0

    def positions(self, data: EvaluationSet) -> np.ndarray:
        """The flat positions of `data.rows` that are scored, [N] int64."""
        maskable = np.flatnonzero(self.collator.maskable[data.rows].reshape(-1))
        drawn = uniform(key(SEED, "pseudo-perplexity", maskable)) < self.share_of(data.name)
        return maskable[drawn]

    def score(self, model: LanguageModel, data: EvaluationSet, done: ProgressCallback) -> float | None:
        if self.share_of(data.name) == 0:
            return None
        mean, kept = PerplexityMeter(self.scoring.backend), self.scoring.row_losses
        by_row = None if kept is None else RowMeter(self.scoring.backend, data.num_rows)
        # One context around all: autocast then casts a trained weight once, not in each forward.
        with autocast(model.precision, self.scoring.backend.device):
            for copies, targets, rows in self._copies(data, done):
                losses = mean.update(self.logits(model, copies), targets)
                if by_row is not None:
                    by_row.update(losses, self.scoring.tensor(rows))
        if kept is not None and by_row is not None:
            kept[self.name, data.name] = by_row.compute()
        return mean.compute()

    def largest_batch(self, data: EvaluationSet) -> Copies | None:
        """This rank's first one, of the longest rows; None where it has none."""
        return next((copies for copies, _, _ in self._copies(data, lambda _: None)), None)

    def logits(self, model: LanguageModel, copies: Copies) -> torch.Tensor:
        """Of one batch, [B, V]."""
        with autocast(model.precision, self.scoring.backend.device):
            # Only the masked position reaches the vocabulary-sized head.
            return model.logits(head_rows_at_masks(model, copies), self.scoring.vocab)

    def _copies(self, data: EvaluationSet, done: ProgressCallback) -> Iterator[tuple[Copies, torch.Tensor, np.ndarray]]:
        """This rank's batches of copies, of alike length, longest first; each with tokens [B] and rows of the set [B].

        The tokens are those that the masks hide.

        A batch holds `batch_size` copies, fewer of rows longer than 128: the memory is bounded.
        """
        collator, backend, tensor = self.collator, self.scoring.backend, self.scoring.tensor
        width = data.rows.shape[1]
        lengths = (data.rows != collator.pad_id).sum(1)
        positions = self.positions(data)
        # Copies of one row stay side by side, and so share what can be computed once per row.
        positions = positions[np.argsort(-lengths[positions // width], kind="stable")]
        sizes = self.settings.batch_size * COPY // np.maximum(lengths[positions // width], COPY)
        starts = [0]
        while starts[-1] < len(positions):
            starts.append(starts[-1] + max(int(sizes[starts[-1]]), 1))
        for start, end in list(pairwise(starts))[backend.rank :: backend.size]:
            numbers, row = np.unique(positions[start:end] // width, return_inverse=True)
            column = positions[start:end] % width
            rows = data.rows[numbers, : lengths[numbers].max()].astype(np.int64)
            valid = None if (rows != collator.pad_id).all() else tensor(rows != collator.pad_id)
            segments = tensor(self.pairs.segments(rows)) if isinstance(self.pairs, MaskedLMAndOrder) else None
            copies = Copies(tensor(rows), valid, tensor(row), tensor(column), collator.mask_id, segments)
            yield copies, tensor(rows[row, column]), numbers[row]
            done(len(row))
