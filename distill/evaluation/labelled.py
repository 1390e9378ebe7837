"""Measures of labels: classes and values, answers to questions, and the order of two segments.

Shapes: N sequences of a set, B of a batch, S positions, C classes.
"""

import math
from dataclasses import replace

import numpy as np
import torch

from distill.data.collate.mlm_sop import MaskedLMAndOrder
from distill.evaluation.classes import ACCURACY, ClassSet
from distill.evaluation.measures import Measure, Pass, ProgressCallback, Scoring, SequenceLosses, SetScores, Sums, mean
from distill.evaluation.questions import SquadSet
from distill.evaluation.sets import EvaluationSet, NotFinite
from distill.evaluation.users import UserMeasures
from distill.models.language_model import LanguageModel, OutputSpec, has_head
from distill.runtime.errors import SettingError

TITLES = {
    "f1": ("F1", "words shared with the best of the right answers, or of the class that is to be detected, in percent"),
    "exact": ("Exact match", "answers that are right word for word, in percent"),
    "best_f1": ("F1, best threshold", "with the threshold for no answer that is best on this very set, in percent"),
    "best_exact": ("Exact match, best threshold", "with the best threshold for it, in percent"),
    "has_answer_f1": ("F1 where there is an answer", "of these questions alone, in percent"),
    "no_answer_exact": ("No answer recognised", "fraction of the questions without an answer, in percent"),
    "accuracy": ("Accuracy", "fraction of the examples whose class is right, in percent"),
    "macro_f1": ("F1, mean of the classes", "in percent"),
    "matthews": ("Matthews correlation", "in percent; 0 is chance"),
    "pearson": ("Pearson correlation", "in percent"),
    "spearman": ("Spearman correlation", "of the ranks, in percent"),
}
ORDER_ACCURACY = Measure(
    "order_accuracy",
    "Order accuracy",
    "fraction of pairs of segments whose order is right; chance gives half",
    lower_is_better=False,
)


class TablePass(Pass):
    """The outputs of a head for every sequence, computed once for all measures; a set need not have all of these."""

    def __init__(self, scoring: Scoring) -> None:
        self.scoring = scoring
        (self.head,) = scoring.heads
        sets = [data for data in scoring.sets if isinstance(data, ClassSet | SquadSet)]
        names = dict.fromkeys(name for data in sets for name in data.measures)
        self.measures = tuple(Measure(name, *TITLES[name], lower_is_better=False) for name in names)
        components = scoring.settings.own_measures
        classes = {len(data.classes) for data in sets if isinstance(data, ClassSet)}
        for component in () if classes else components.values():
            problem = "reads logits and targets, which questions with answers do not have: leave it out"
            raise SettingError(f"{component.setting}._target_={component.path} {problem}")
        self.users = UserMeasures(components, max({1, *classes}), scoring.ranks)
        self.user_measures = self.users.measures

    def score(self, model: LanguageModel, data: EvaluationSet, on_progress: ProgressCallback) -> SetScores:
        assert isinstance(data, ClassSet | SquadSet)
        ranks = self.scoring.ranks
        self.users.reset()
        # Each rank fills in its own sequences: adding the zeros of the others changes nothing.
        outputs = torch.zeros(data.num_sequences, *data.output_shape, device=ranks.device)
        for batch in self.scoring.batches(data, on_progress):
            logits = model(batch.inputs, batch.documents, OutputSpec(extra=(self.head,))).extra[self.head]
            numbers = self.scoring.tensor(batch.row_ids)
            if isinstance(data, ClassSet) and logits.shape[1:] != data.output_shape:
                raise ValueError(f"outputs of shape {tuple(logits.shape)} for {outputs.shape[1]} classes")
            outputs[numbers, : logits.shape[1]] = logits.float()  # batches are cut to the longest sequence
            if self.head in batch.labels:
                sequences, targets = batch.labels[self.head]
                self.users.update(logits[sequences], targets)
        ranks.barrier()  # one may score for longer than the others wait in an exchange
        of_all = ranks.sum(outputs).cpu().numpy()  # [N, C] or [N, S, 2]
        losses: dict[str, SequenceLosses | np.ndarray] = {}
        try:
            if isinstance(data, SquadSet):
                scores, right = data.answered(of_all)
                losses = {name: SequenceLosses(1 - each, np.ones(len(each))) for name, each in right.items()}
            else:
                scores = data.scores(of_all)
                losses = dict.fromkeys(data.measures, predicted := data.predicted(of_all))
                is_wrong = (predicted != data.labels).astype(np.float64)
                losses |= {ACCURACY: SequenceLosses(is_wrong, np.ones(len(of_all)))} if ACCURACY in losses else {}
        except NotFinite:  # as after a divergence
            scores = dict.fromkeys(data.measures, math.nan)
        values = {name: scores[name] for name in data.measures} | self.users.compute(data.name)
        return SetScores(values, len(data.questions if isinstance(data, SquadSet) else of_all), losses)


class OrderPass(Pass):
    """Whether two segments are swapped: half of the pairs are, the same ones in every run, so that chance is 0.5."""

    measures = (ORDER_ACCURACY,)

    def __init__(self, scoring: Scoring) -> None:
        assert isinstance(scoring.collator, MaskedLMAndOrder)
        self.scoring = replace(scoring, collator=replace(scoring.collator, swaps=True))

    def score(self, model: LanguageModel, data: EvaluationSet, on_progress: ProgressCallback) -> SetScores:
        if not has_head(model, "sop"):
            return SetScores({}, 0)
        sums = Sums(2, data.num_sequences, self.scoring.ranks)
        for batch in self.scoring.batches(data, on_progress):
            sequences, swapped = batch.labels["sop"]
            logits = model(batch.inputs, batch.documents, OutputSpec(extra=("sop",))).extra["sop"][sequences]
            right = logits.argmax(-1) == swapped
            sums.add(self.scoring.tensor(batch.row_ids)[sequences], right, torch.ones_like(right))
        right, count = sums.over_ranks()[:, -1]
        return SetScores({ORDER_ACCURACY.name: mean(right, count)}, int(count))
