"""Perplexity: of masked models at the positions of a fixed mask; and what all measures of token losses have in common.

Shapes: R sequences of a set, N scored tokens, E input size of the output embedding, V vocabulary.
"""

from abc import abstractmethod
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torchmetrics import Metric

from distill.config.component import Component
from distill.evaluation.measures import (
    NO_BYPRODUCTS,
    PRODUCT_BYTES,
    Byproducts,
    Measure,
    Pass,
    ProgressCallback,
    Scoring,
    chunk_rows,
    exp,
    losses_of,
)
from distill.evaluation.measures.over_ranks import compute_metric, sum_exchange
from distill.evaluation.measures.users import UserMeasures
from distill.evaluation.sets import SEED, EvaluationSet
from distill.evaluation.significance import SequenceLosses
from distill.models.language_model import LanguageModel
from distill.runtime.seed import key

PERPLEXITY = Measure(
    "perplexity",
    "Perplexity",
    "the exponential of the mean cross-entropy at the masked positions of a fixed, seeded mask, by the model's own "
    "probabilities, which are over all rows of its output embedding",
)


class Perplexity(Metric):
    """exp of the mean negative log-likelihood of tokens, by name."""

    is_differentiable, higher_is_better, full_state_update = False, False, False
    sums: Tensor  # [2] float64: the losses and their number, which all ranks exchange as one

    def __init__(self, name: str = "perplexity", **exchange: Any) -> None:
        super().__init__(**exchange)
        self.name = name
        self.add_state("sums", torch.zeros(2, dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, losses: Tensor, num_bytes: Tensor | None = None, is_text: Tensor | None = None) -> None:
        """Add the losses [N] float64, in nats; what text the tokens are does not count."""
        self.sums[0] += losses.sum()
        self.sums[1] += len(losses)

    def compute(self) -> dict[str, float]:
        """The value by its name; not a number without a token, infinite where it exceeds float64."""
        total, count = self.sums.tolist()
        return {self.name: exp(total / count) if count else float("nan")}


class SequenceLossSums(Metric):
    """The losses of tokens added up by the sequence that they are in."""

    is_differentiable, higher_is_better, full_state_update = False, False, False
    sums: Tensor  # [2, R] float64: losses, and how many they are

    def __init__(self, num_sequences: int, **exchange: Any) -> None:
        super().__init__(**exchange)
        self.add_state("sums", torch.zeros(2, num_sequences, dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, losses: Tensor, sequences: Tensor) -> None:
        """losses [N] float64, and the number in the set of the sequence of each, sequences [N] int64"""
        self.sums[0].index_add_(0, sequences, losses)
        self.sums[1].index_add_(0, sequences, torch.ones_like(losses))

    def compute(self) -> Tensor:
        """[2, R] float64: by row the sum of the losses in nats, and their number."""
        return self.sums

    def result(self) -> SequenceLosses:
        """The sums over all ranks, which all call this."""
        losses, counts = self.compute().cpu().numpy()
        return SequenceLosses(losses, counts)


class Part(NamedTuple):
    """Tokens that are scored together."""

    head_rows: Tensor  # [N, E]
    targets: Tensor  # [N] int64
    sequences: Tensor  # [N] int64, the sequence of the set that each is in
    # What bits per byte need: the bytes of text that each stands for [N] int64, and whether it is text at all [N] bool.
    num_bytes: Tensor | None = None
    is_text: Tensor | None = None


class TokenPass(Pass):
    """A pass whose measures read the losses of tokens; those of the user's get their logits."""

    chunked = False  # whether logits are computed in chunks also where those of a part fit into memory

    def __init__(
        self, scoring: Scoring, metric: Metric, measures: tuple[Measure, ...], components: dict[str, Component]
    ) -> None:
        """`components`: the user's measures that read it too."""
        self.scoring, self.measures = scoring, measures
        self.metric = metric.to(scoring.ranks.device)
        self.users = UserMeasures(components, scoring.vocab, scoring.ranks)
        self.user_measures = self.users.measures

    def by_sequence(self, data: EvaluationSet) -> str | None:
        return self.measures[0].name

    @abstractmethod
    def parts(self, model: LanguageModel, data: EvaluationSet, on_progress: ProgressCallback) -> Iterator[Part]:
        """This rank's tokens."""

    def score(
        self,
        model: LanguageModel,
        data: EvaluationSet,
        on_progress: ProgressCallback,
        byproducts: Byproducts = NO_BYPRODUCTS,
    ) -> dict[str, float]:
        self.metric.reset()
        self.users.reset()
        for part in self.parts(model, data, on_progress):
            losses = self._losses(model, part)
            self.metric.update(losses, part.num_bytes, part.is_text)
            if byproducts.sequence_losses is not None:
                byproducts.sequence_losses.update(losses, part.sequences)
            if byproducts.head_rows is not None:
                byproducts.head_rows.add(data.name, part.head_rows)
        return {**compute_metric(self.metric), **self.users.compute(data.name)}

    def _losses(self, model: LanguageModel, part: Part) -> Tensor:
        """[N] float64"""
        vocab, losses = self.scoring.vocab, []
        size = chunk_rows(vocab) if self.chunked else max(1, PRODUCT_BYTES // (4 * vocab))
        for rows, targets in zip(part.head_rows.split(size), part.targets.split(size), strict=True):
            logits = model.logits(rows)
            losses.append(losses_of(logits, targets))
            self.users.update(logits[:, :vocab], targets)
        return torch.cat(losses)


class MaskPass(TokenPass):
    """The masked positions of a fixed mask.

    15 % of the maskable positions of each sequence, all alike; 80 % of them masked, 10 % random, 10 % kept (BERT's
    training task).
    """

    keeps_head_rows = True

    def __init__(self, scoring: Scoring) -> None:
        super().__init__(
            scoring, Perplexity(**sum_exchange(scoring.ranks)), (PERPLEXITY,), scoring.settings.own_measures
        )

    def parts(self, model: LanguageModel, data: EvaluationSet, on_progress: ProgressCallback) -> Iterator[Part]:
        for batch, rows in self.scoring.head_rows(model, data, on_progress):
            positions, targets = batch.targets
            yield Part(rows, targets, self.scoring.tensor(batch.row_ids)[positions // batch.ids.shape[1]])

    def num_positions(self, data: EvaluationSet) -> int:
        count = sum(len(batch.targets.positions) for batch in self.scoring.collated(data))
        return int(self.scoring.ranks.sum(torch.tensor(count)))

    def has_positions(self, data: EvaluationSet) -> bool:
        collator, size = self.scoring.collator_of(data), self.scoring.settings.batch_size
        for start in range(0, data.num_sequences, size):
            numbers = np.arange(start, min(start + size, data.num_sequences))
            keys = key(SEED, "evaluation mask", numbers)
            if len(collator.collate(data.sequences[numbers], keys, numbers).targets.positions):
                return True
        return False
