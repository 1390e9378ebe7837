"""Perplexity of a masked language model at the positions of a fixed mask."""

from distill.evaluation.measures import PerplexityMeter, ProgressCallback, Scoring
from distill.evaluation.row_losses import RowMeter
from distill.evaluation.sets import EvaluationSet
from distill.models.language_model import LanguageModel


class Perplexity:
    """exp of the mean cross-entropy at the masked positions.

    15 % of the maskable positions of each row, all alike; 80 % of them masked, 10 % random, 10 % kept (BERT's training
    task).
    """

    name = "perplexity"
    title = "Perplexity"
    explanation = "the exponential of the mean cross-entropy at the masked positions of a fixed, seeded mask"
    lower_is_better = True
    unit = "rows"

    def __init__(self, scoring: Scoring) -> None:
        self.scoring = scoring

    def size(self, data: EvaluationSet) -> int:
        return data.num_rows

    def scores_any(self, data: EvaluationSet) -> bool:
        return self.scoring.has_targets(data)

    def num_positions(self, data: EvaluationSet) -> int:
        return self.scoring.num_targets(data)

    def score(self, model: LanguageModel, data: EvaluationSet, done: ProgressCallback) -> float:
        mean = PerplexityMeter(self.scoring.backend)
        kept = self.scoring.row_losses
        by_row = None if kept is None else RowMeter(self.scoring.backend, data.num_rows)
        for batch, rows in self.scoring.head_rows(model, data, done):
            positions, targets = batch.targets
            losses = mean.update(model.logits(rows, self.scoring.vocab), targets)
            if by_row is not None:
                by_row.update(losses, self.scoring.tensor(batch.row_ids)[positions // batch.ids.shape[1]])
        if kept is not None and by_row is not None:
            kept[self.name, data.name] = by_row.compute()
        return mean.compute()
