"""Measures of labelled examples: each set says what its scores are, from the outputs of a model for all of its rows.

Shapes: N rows of a set, S positions.
"""

from collections.abc import Sequence

import numpy as np
import torch

from distill.evaluation.glue import ClassSet
from distill.evaluation.measures import Measure, ProgressCallback, Scoring
from distill.evaluation.sets import EvaluationSet
from distill.evaluation.squad import SquadSet
from distill.models.language_model import LanguageModel, OutputSpec

TITLES = {
    "f1": ("F1", "words shared with the best of the right answers, or of the class that is looked for, in percent"),
    "exact": ("Exact match", "answers that are right word for word, in percent"),
    "best_f1": ("F1, best threshold", "with the threshold for no answer that is best on this very set"),
    "best_exact": ("Exact match, best threshold", "likewise"),
    "has_answer_f1": ("F1 where there is an answer", "of these questions alone"),
    "no_answer_exact": ("No answer found as such", "share of the questions without an answer, in percent"),
    "accuracy": ("Accuracy", "share of the rows whose class is found, in percent"),
    "macro_f1": ("F1, mean of the classes", "in percent"),
    "matthews": ("Matthews correlation", "in percent; 0 is chance"),
    "pearson": ("Pearson correlation", "in percent"),
    "spearman": ("Spearman correlation", "of the ranks, in percent"),
}


class HeadOutputs:
    """The outputs of a head for every row of a set, computed once for all measures."""

    def __init__(self, scoring: Scoring, head: str) -> None:
        self.scoring, self.head = scoring, head
        self._last: tuple[object, EvaluationSet, np.ndarray] | None = None

    def of(self, model: LanguageModel, data: EvaluationSet, done: ProgressCallback) -> np.ndarray:
        """[N, C] float32, or [N, S, 2] of answers; the same on all ranks."""
        if self._last is not None and self._last[0] is model and self._last[1] is data:
            done(-(-data.num_rows // self.scoring.backend.size))
            return self._last[2]
        found: torch.Tensor | None = None
        for batch in self.scoring.batches(data, done):
            logits = model(batch.inputs, batch.documents, OutputSpec(extra=(self.head,))).extra[self.head]
            if found is None:
                inner = logits.shape[1:] if logits.dim() == 2 else (data.rows.shape[1], logits.shape[-1])
                found = logits.new_zeros((data.num_rows, *inner))
            rows = torch.from_numpy(batch.row_ids).to(found.device)
            if logits.dim() == 2:
                found[rows] = logits
            else:
                found[rows, : logits.shape[1]] = logits  # batches are cut to the longest of their rows
        outputs = self._of_all_ranks(found, data).float().cpu().numpy()
        self._last = (model, data, outputs)
        return outputs

    def _of_all_ranks(self, found: torch.Tensor | None, data: EvaluationSet) -> torch.Tensor:
        """Every rank has its own rows and zeros elsewhere, so that the sum has all; one without rows has no shape."""
        backend = self.scoring.backend
        shapes = torch.zeros(backend.size, 2, device=backend.device)
        if found is not None:
            shapes[backend.rank, : found.dim() - 1] = torch.tensor(found.shape[1:], dtype=torch.float32)
        inner = [int(each) for each in backend.sum(shapes).max(0).values.tolist() if each]
        found = torch.zeros((data.num_rows, *inner), device=backend.device) if found is None else found
        return backend.sum(found)


class TableMeasure:
    """One of the scores of sets of labelled examples; None for a set that has no such score."""

    lower_is_better = False
    unit = "rows"

    def __init__(self, name: str, outputs: HeadOutputs) -> None:
        self.name, self.outputs = name, outputs
        self.title, self.explanation = TITLES[name]

    def size(self, data: EvaluationSet) -> int:
        return data.num_rows

    def num_positions(self, data: EvaluationSet) -> int:
        return data.num_rows

    def score(self, model: LanguageModel, data: EvaluationSet, done: ProgressCallback) -> float | None:
        assert isinstance(data, ClassSet | SquadSet)
        if self.name not in data.measures:
            return None
        return data.scores(self.outputs.of(model, data, done))[self.name]


def table_measures(scoring: Scoring, head: str, sets: Sequence[EvaluationSet]) -> list[Measure]:
    """The measures that any of the sets has, in their order."""
    outputs = HeadOutputs(scoring, head)
    names = dict.fromkeys(name for data in sets if isinstance(data, ClassSet | SquadSet) for name in data.measures)
    return [TableMeasure(name, outputs) for name in names]
