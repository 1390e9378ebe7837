"""Perplexity of a masked language model at the positions of a fixed mask."""

from distill.evaluation.measures import PerplexityMeter, ProgressCallback, Scoring
from distill.evaluation.sets import EvaluationSet
from distill.models.language_model import LanguageModel, OutputSpec


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

    def num_positions(self, data: EvaluationSet) -> int:
        return self.scoring.num_targets(data)

    def score(self, model: LanguageModel, data: EvaluationSet, done: ProgressCallback) -> float:
        mean = PerplexityMeter(self.scoring.backend)
        for batch in self.scoring.batches(data, done):
            positions, targets = batch.targets
            rows = model(batch.inputs, batch.documents, OutputSpec(True, positions)).head_rows
            mean.update(model.logits(rows, self.scoring.vocab), targets)
        return mean.compute()
