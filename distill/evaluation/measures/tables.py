"""Measures of labelled examples: each set defines its scores, from the outputs of a model for all of its sequences.

Shapes: N sequences of a set, S positions.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from distill.evaluation.measures import NO_BYPRODUCTS, Byproducts, Measure, Pass, ProgressCallback, Scoring
from distill.evaluation.measures.classes import ACCURACY, ClassSet
from distill.evaluation.measures.over_ranks import compute_metric, sum_exchange
from distill.evaluation.measures.squad import SquadSet
from distill.evaluation.measures.users import UserMeasures, refuse_measures
from distill.evaluation.sets import EvaluationSet, NotFinite
from distill.models.language_model import LanguageModel, OutputSpec

TITLES = {
    "f1": ("F1", "words shared with the best of the right answers, or of the class that is to be detected, in percent"),
    "exact": ("Exact match", "answers that are right word for word, in percent"),
    "best_f1": ("F1, best threshold", "with the threshold for no answer that is best on this very set"),
    "best_exact": ("Exact match, best threshold", "likewise"),
    "has_answer_f1": ("F1 where there is an answer", "of these questions alone"),
    "no_answer_exact": ("No answer recognised", "fraction of the questions without an answer, in percent"),
    "accuracy": ("Accuracy", "fraction of the examples whose class is right, in percent"),
    "macro_f1": ("F1, mean of the classes", "in percent"),
    "matthews": ("Matthews correlation", "in percent; 0 is chance"),
    "pearson": ("Pearson correlation", "in percent"),
    "spearman": ("Spearman correlation", "of the ranks, in percent"),
}


class TableScores(Metric):
    """The scores of one set by name, from the outputs for all of its sequences, of which each rank computes a part."""

    is_differentiable, higher_is_better, full_state_update = False, True, False
    outputs: Tensor  # [N, C] float32, or [N, S, 2] of answers; zeros for the sequences of other ranks

    def __init__(self, data: ClassSet | SquadSet, **exchange: Any) -> None:
        super().__init__(**exchange)
        self.data = data
        width = (max(len(data.classes), 1),) if isinstance(data, ClassSet) else (data.sequences.shape[1], 2)
        self.add_state("outputs", torch.zeros(data.num_sequences, *width), dist_reduce_fx="sum")

    def update(self, logits: Tensor, numbers: Tensor) -> None:
        """logits [B, C], or [B, S, 2] of answers, and the numbers [B] of their sequences"""
        if logits.dim() == 2:
            if logits.shape[1:] != self.outputs.shape[1:]:
                raise ValueError(f"outputs of shape {tuple(logits.shape)} for {self.outputs.shape[1]} classes")
            self.outputs[numbers] = logits.float()
        else:
            self.outputs[numbers, : logits.shape[1]] = logits.float()  # batches are cut to the longest sequence

    def compute(self) -> dict[str, float]:
        """The measures of the set by name, in percent; nan where outputs are not finite, as after a divergence."""
        try:
            scores = self.data.scores(self.outputs.cpu().numpy())
        except NotFinite:
            return dict.fromkeys(self.data.measures, math.nan)
        return {name: scores[name] for name in self.data.measures}


class TablePass(Pass):
    """The outputs of a head for every sequence, computed once for all measures; a set need not have all of these."""

    def __init__(self, scoring: Scoring) -> None:
        self.scoring = scoring
        (self.head,) = scoring.heads
        sets = [data for data in scoring.sets if isinstance(data, ClassSet | SquadSet)]
        names = dict.fromkeys(name for data in sets for name in data.measures)
        self.measures = tuple(Measure(name, *TITLES[name], lower_is_better=False) for name in names)
        self.users = _user_measures(scoring)
        self.user_measures = self.users.measures

    def by_sequence(self, data: EvaluationSet) -> str | None:
        return ACCURACY if isinstance(data, ClassSet) and ACCURACY in data.measures else None

    def num_positions(self, data: EvaluationSet) -> int:
        return len(data.questions.questions) if isinstance(data, SquadSet) else data.num_sequences

    def score(
        self,
        model: LanguageModel,
        data: EvaluationSet,
        on_progress: ProgressCallback,
        byproducts: Byproducts = NO_BYPRODUCTS,
    ) -> dict[str, float]:
        assert isinstance(data, ClassSet | SquadSet)
        ranks = self.scoring.ranks
        metric = TableScores(data, **sum_exchange(ranks)).to(ranks.device)
        self.users.reset()
        for batch in self.scoring.batches(data, on_progress):
            logits = model(batch.inputs, batch.documents, OutputSpec(extra=(self.head,))).extra[self.head]
            numbers = self.scoring.tensor(batch.row_ids)
            metric.update(logits, numbers)
            if byproducts.sequence_losses is not None and isinstance(data, ClassSet):
                is_wrong = logits.argmax(1) != self.scoring.tensor(data.labels[batch.row_ids])
                byproducts.sequence_losses.update(is_wrong.double(), numbers)
            if self.head in batch.labels:
                sequences, targets = batch.labels[self.head]
                self.users.update(logits[sequences], targets)
        return {**compute_metric(metric), **self.users.compute(data.name)}


def _user_measures(scoring: Scoring) -> UserMeasures:
    """Those of the user's for these sets, which all have the same classes.

    Raises:
        SettingError: they are sets of questions, whose outputs no Metric of logits and targets reads.
    """
    classes = next((data.classes for data in scoring.sets if isinstance(data, ClassSet)), None)
    if classes is None:
        refuse_measures(scoring.settings.own_measures, "questions with answers")
        return UserMeasures({}, 1, scoring.ranks)
    return UserMeasures(scoring.settings.own_measures, max(len(classes), 1), scoring.ranks)
