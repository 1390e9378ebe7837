"""Scores models: every measure on every set, and how alike student and teacher are."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from distill.config.settings import PrecisionConfig
from distill.data.sequence_store import outer_ids
from distill.evaluation.measures import Measure, Pass, ProgressCallback, Scoring, SequenceLosses, Sums, chunk_rows, mean
from distill.evaluation.readers import Readers
from distill.evaluation.sets import EvaluationSet, SetContents
from distill.evaluation.significance import ModelLosses
from distill.models.language_model import LanguageModel, OutputSpec, idle_forward
from distill.runtime.errors import SettingError
from distill.runtime.progress import Progress, in_a_sentence

Scores = dict[str, dict[str, float]]  # by measure, then by evaluation set


class Evaluator:
    """Scores models on evaluation sets; each rank takes its part of the sequences, the sums are exchanged.

    Attributes:
        measures: those of the task, the first of which decides which of two models is better, then the user's.
        readers: opens models for scoring, and counts the seconds that scoring takes.
    """

    def __init__(self, scoring: Scoring, passes: list[Pass], precision: PrecisionConfig) -> None:
        self.scoring, self.passes, self.ranks = scoring, passes, scoring.ranks
        self.readers = Readers(precision, scoring.ranks)
        of_task = [measure for run in passes for measure in run.measures]
        if taken := {measure.name for measure in of_task} & {*scoring.settings.measures}:
            name = min(taken)
            raise SettingError(f"evaluate.measures.{name}: this task measures {name} itself; give yours another name")
        self.measures: list[Measure] = [*of_task, *(measure for run in passes for measure in run.user_measures)]
        self._positions: dict[tuple[str, str], int] = {}  # that were scored, by the first measure of a pass and set

    def score(self, model: Any, label: str, sets: list[EvaluationSet]) -> Scores:
        """Every measure of a model on every set; progress calls the model `label`."""
        return self.score_by_sequence(model, label, sets)[0]

    def score_by_sequence(self, model: Any, label: str, sets: list[EvaluationSet]) -> tuple[Scores, ModelLosses]:
        """`score`, and the losses or predictions by sequence that conclusions read, by measure and set."""
        scores: Scores = {measure.name: {} for measure in self.measures}
        losses: dict[tuple[str, str], SequenceLosses | np.ndarray] = {}
        with self.readers.timed(), self.readers.opened(model) as reader:
            for data in sets:
                for run in self.passes:
                    if not run.measures or not (size := run.size(data)):
                        continue
                    first = run.measures[0]
                    title = f"{label}, {in_a_sentence(first.title)} on {data.name}"
                    with self._progress(title, size, run.unit) as on_progress:
                        found = run.score(reader, data, on_progress)
                    self._positions[first.name, data.name] = found.positions
                    losses |= {(name, data.name): each for name, each in found.losses.items()}
                    for name, value in found.values.items():
                        scores[name][data.name] = value
        return {name: values for name, values in scores.items() if values or not sets}, losses

    def agree(self, student: Any, teacher: Any, sets: list[EvaluationSet]) -> dict[str, dict[str, float]]:
        """Fraction of equal first choices (`top1`) and mean KL(teacher || student) in nats (`kl`), at all targets."""
        with (
            self.readers.timed(),
            self.ranks.in_lockstep([student, teacher], idle_forward),
            self.readers.opened(student) as one,
            self.readers.opened(teacher) as other,
        ):
            return {data.name: self._agreement(one, other, data) for data in sets}

    def describe(self, data: EvaluationSet) -> SetContents:
        """What a set holds on which a model was scored, and at how many of its positions, on all ranks."""
        return {
            "name": data.name,
            "description": data.description,
            "documents": data.documents,
            "sequences": data.num_sequences,
            "tokens": int((outer_ids(data.sequences) != self.scoring.collator_of(data).pad_id).sum()),
            "positions": self._positions[self.measures[0].name, data.name],
            "pseudo_positions": self._positions.get(("pseudo_perplexity", data.name), 0),
        }

    def _agreement(self, student: LanguageModel, teacher: LanguageModel, data: EvaluationSet) -> dict[str, float]:
        sums, vocab = Sums(3, data.num_sequences, self.ranks), self.scoring.vocab
        with self._progress(f"agreement on {data.name}", data.num_sequences, "sequences") as on_progress:
            for batch in self.scoring.batches(data, on_progress):
                positions = batch.targets.positions
                spec = OutputSpec(True, positions)
                rows = [model(batch.inputs, batch.documents, spec).head_rows for model in (student, teacher)]
                numbers = self.scoring.tensor(batch.row_ids)[positions // batch.ids.shape[1]]
                chunks = (part.split(chunk_rows(vocab)) for part in (numbers, *rows))
                for sequences, one, other in zip(*chunks, strict=True):
                    x, y = student.logits(one, vocab).float(), teacher.logits(other, vocab).float()
                    shared = min(x.shape[1], y.shape[1])  # one may have a few special tokens more
                    log_q, log_p = x[:, :shared].log_softmax(-1), y[:, :shared].log_softmax(-1)
                    is_equal = x[:, :shared].argmax(-1) == y[:, :shared].argmax(-1)
                    divergence = (log_p.exp() * (log_p - log_q)).sum(-1).double()
                    sums.add(sequences, is_equal, divergence, torch.ones_like(divergence))
        top1, kl, count = sums.over_ranks()[:, -1]
        return {"top1": mean(top1, count), "kl": mean(kl, count)}

    @contextmanager
    def _progress(self, label: str, total: int, unit: str) -> Iterator[ProgressCallback]:
        """Rank 0 shows how far all ranks are, estimated from its own part."""
        with Progress(label, total, unit) as progress:
            yield lambda scored: progress.update(min(progress.n + scored * self.ranks.size, total))
