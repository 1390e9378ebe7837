"""The losses of a run on its evaluation sets: the measures where no loss trains a head that predicts tokens.

The perplexity of such a student, and of its teacher, would be that of heads which nobody has trained.
"""

from dataclasses import replace

import torch

from distill.data.sequence_format import first_token
from distill.evaluation.evaluator import Evaluator
from distill.evaluation.measures import Measure, Pass, ProgressCallback, Scoring, SetScores
from distill.evaluation.readers import Readers
from distill.evaluation.sets import EvaluationSet
from distill.models.check import max_positions
from distill.models.language_model import LanguageModel, idle_forward
from distill.objective.objective import Objective
from distill.runs.pair import Pair
from distill.runs.run import Run
from distill.runtime.errors import SettingError
from distill.runtime.progress import in_a_sentence
from distill.teacher.live import LiveTeacher, RetokenizedTeacher
from distill.teacher.prompted import prompted


def loss_evaluator(run: Run) -> Evaluator:
    """What scores the student of a run by its losses.

    Raises:
        SettingError: a setting is about logits, of a head that is not trained.
    """
    settings, ranks = run.config.evaluate, run.ranks
    logits = {"evaluate.baseline": settings.baseline, "evaluate.measures": [*settings.measures]}
    if named := next((name for name, value in logits.items() if value), None):
        raise SettingError(
            f"{named} is about predicted tokens, and no loss of this objective trains the head that predicts them: "
            "leave it out, or give objective.mlm, objective.clm or objective.soft a weight"
        )
    # As in training: what is masked there is masked here, and else nothing.
    scoring = replace(
        run.task.scoring(run.config, run.pair.tokenizer, run.data.sets, ranks), collator=run.data.batches.collator
    )
    losses = LossPass(scoring, run.objective, run.pair, Readers(run.config.precision, ranks))
    return Evaluator(scoring, [losses], run.config.precision)


class LossPass(Pass):
    """Each loss term between the student and its teacher, as in training: its sum over a set by its count."""

    def __init__(self, scoring: Scoring, objective: Objective, pair: Pair, readers: Readers) -> None:
        self.scoring, self.objective, self.pair, self.readers = scoring, objective, pair, readers
        explanation = "the mean of objective.{} between student and teacher, as in training"
        self.measures = tuple(
            Measure(f"{name}_loss", f"Loss of {in_a_sentence(term.title or name)}", explanation.format(name))
            for name, term in objective.terms.items()
        )

    def score(self, model: LanguageModel, data: EvaluationSet, on_progress: ProgressCallback) -> SetScores:
        # Of several teachers training compares hidden states with those of the first.
        first = self.pair.teachers[0]
        with self.readers.opened(first.model) as reader:
            teacher = prompted(LiveTeacher(reader), first.context, first_token(self.pair.tokenizer))
            if self.pair.tokenizers is not None:
                teacher = RetokenizedTeacher(reader, data.sequences, *self.pair.tokenizers, max_positions(reader.model))
            sums = torch.zeros(2, len(self.measures), dtype=torch.float64)  # this rank's, of the terms and their counts
            ranks, terms = self.scoring.ranks, list(self.objective.terms.values())
            left = -(-data.num_sequences // (ranks.size * self.scoring.settings.batch_size))  # batches of any rank
            for unread in self.scoring.batches(data, on_progress):
                left, batch = left - 1, teacher.read_ahead(unread).to(ranks.device)
                (output,) = teacher.outputs([batch], self.objective.teacher_spec)
                outputs = model(batch.inputs, batch.documents, self.objective.student_spec(batch))
                losses = torch.stack([term.loss_sum(outputs, output, batch).double() for term in terms])
                sums[0] += losses.cpu()  # one wait for the device, whatever the number of terms
                sums[1] += torch.tensor([term.count(batch) for term in terms], dtype=torch.float64)
            for _ in range(left):  # a sharded teacher computes on all ranks together
                idle_forward(reader.model)
        ranks.barrier()  # one may score for longer than the others wait in an exchange
        means = (total / max(count, 1) for total, count in zip(*ranks.sum(sums).tolist(), strict=True))
        values = {measure.name: mean for measure, mean in zip(self.measures, means, strict=True)}
        return SetScores(values, data.num_sequences)
