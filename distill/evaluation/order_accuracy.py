"""Accuracy of the order of two segments: the share of pairs for which a model finds out whether they are swapped."""

from dataclasses import replace

import torch

from distill.data.collate.mlm_sop import MaskedLMAndOrder
from distill.evaluation.measures import ProgressCallback, Scoring
from distill.evaluation.sets import EvaluationSet
from distill.models.language_model import LanguageModel, OutputSpec, has_head


class OrderAccuracy:
    """Half of the pairs are swapped, the same ones in every run, so that chance is 0.5."""

    name = "order_accuracy"
    title = "Order accuracy"
    explanation = "share of pairs of segments whose order is found; chance finds half"
    lower_is_better = False
    unit = "rows"

    def __init__(self, scoring: Scoring) -> None:
        assert isinstance(scoring.collator, MaskedLMAndOrder)
        self.scoring = replace(scoring, collator=replace(scoring.collator, swaps=True))

    def size(self, data: EvaluationSet) -> int:
        return data.num_rows

    def num_positions(self, data: EvaluationSet) -> int:
        return data.num_rows

    def score(self, model: LanguageModel, data: EvaluationSet, done: ProgressCallback) -> float | None:
        if not has_head(model, "sop"):
            return None
        sums = torch.zeros(2, dtype=torch.float64, device=self.scoring.backend.device)
        for batch in self.scoring.batches(data, done):
            rows, swapped = batch.labels["sop"]
            logits = model(batch.inputs, batch.documents, OutputSpec(extra=("sop",))).extra["sop"][rows]
            sums[0] += (logits.argmax(-1) == swapped).sum()
            sums[1] += len(swapped)
        right, count = self.scoring.backend.sum(sums).tolist()
        return right / max(count, 1)
