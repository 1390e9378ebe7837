"""A base class for measures of one's own: the mean of a value over the positions of perplexity."""

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from distill.evaluation.measures import ProgressCallback, Scoring
from distill.evaluation.sets import EvaluationSet
from distill.models.language_model import LanguageModel, OutputSpec
from distill.runtime.errors import SettingError


class TargetMean(ABC):
    """The mean of `values` over the positions with a token to predict, of all rows and ranks.

    A class that inherits from it says `title`, `explanation` and `lower_is_better`, as `Measure` describes them.
    """

    name: str
    title: str
    explanation: str
    lower_is_better: bool
    unit = "rows"

    def __init__(self, scoring: Scoring) -> None:
        self.scoring = scoring

    @abstractmethod
    def values(self, logits: Tensor, targets: Tensor) -> Tensor:
        """One value per position: logits [N, V] and the tokens to predict [N] -> [N], numbers or booleans."""

    def size(self, data: EvaluationSet) -> int:
        return data.num_rows

    def num_positions(self, data: EvaluationSet) -> int:
        return self.scoring.num_targets(data)

    def score(self, model: LanguageModel, data: EvaluationSet, done: ProgressCallback) -> float:
        sums = torch.zeros(2, dtype=torch.float64, device=self.scoring.backend.device)
        for batch in self.scoring.batches(data, done):
            positions, targets = batch.targets
            rows = model(batch.inputs, batch.documents, OutputSpec(True, positions)).head_rows
            values = self.values(model.logits(rows, self.scoring.vocab), targets)
            if values.shape != targets.shape:
                raise SettingError(
                    f"evaluate.measures.{self.name}: values() gives {list(values.shape)} for {len(targets)} positions; "
                    "give one value per position"
                )
            sums[0] += values.double().sum()
            sums[1] += len(targets)
        total, count = self.scoring.backend.sum(sums).tolist()
        return total / count if count else float("nan")
