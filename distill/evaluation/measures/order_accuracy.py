"""Accuracy of the order of two segments: the fraction of pairs for which a model detects whether they are swapped."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from distill.data.collate.mlm_sop import MaskedLMAndOrder
from distill.evaluation.measures import NO_BYPRODUCTS, Byproducts, Measure, Pass, ProgressCallback, Scoring
from distill.evaluation.measures.over_ranks import compute_metric, sum_exchange
from distill.evaluation.sets import EvaluationSet
from distill.models.language_model import LanguageModel, OutputSpec, has_head


class OrderAccuracy(Metric):
    """The fraction of right answers."""

    is_differentiable, higher_is_better, full_state_update = False, True, False
    sums: Tensor  # [2] float64: right answers, and all of them

    def __init__(self, **exchange: Any) -> None:
        super().__init__(**exchange)
        self.add_state("sums", torch.zeros(2, dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, logits: Tensor, swapped: Tensor) -> None:
        """Add the logits [B, 2] of B pairs, and whether each is swapped, [B] 0 or 1."""
        self.sums[0] += (logits.argmax(-1) == swapped).sum()
        self.sums[1] += len(swapped)

    def compute(self) -> dict[str, float]:
        """`order_accuracy`, a fraction; 0 without a pair."""
        right, count = self.sums.tolist()
        return {"order_accuracy": right / max(count, 1)}


class OrderPass(Pass):
    """Half of the pairs are swapped, the same ones in every run, so that chance is 0.5."""

    measures = (
        Measure(
            "order_accuracy",
            "Order accuracy",
            "fraction of pairs of segments whose order is right; chance gives half",
            lower_is_better=False,
        ),
    )

    def __init__(self, scoring: Scoring) -> None:
        assert isinstance(scoring.collator, MaskedLMAndOrder)
        self.scoring = replace(scoring, collator=replace(scoring.collator, swaps=True))
        self.metric = OrderAccuracy(**sum_exchange(scoring.ranks)).to(scoring.ranks.device)

    def score(
        self,
        model: LanguageModel,
        data: EvaluationSet,
        on_progress: ProgressCallback,
        byproducts: Byproducts = NO_BYPRODUCTS,
    ) -> dict[str, float]:
        if not has_head(model, "sop"):
            return {}
        self.metric.reset()
        for batch in self.scoring.batches(data, on_progress):
            sequences, swapped = batch.labels["sop"]
            logits = model(batch.inputs, batch.documents, OutputSpec(extra=("sop",))).extra["sop"][sequences]
            self.metric.update(logits, swapped)
        values: dict[str, float] = compute_metric(self.metric)
        return values
