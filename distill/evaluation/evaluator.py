"""Scores models: every measure on every set, how alike student and teacher are, and how fast each runs.

Shapes: N positions scored, V vocabulary.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from distill.backends import Backend
from distill.config import EvaluateConfig, PrecisionConfig
from distill.data.batch import Batch
from distill.data.collate.mlm import MaskedLM
from distill.evaluation.measures import Measure, ProgressCallback, Scoring
from distill.evaluation.perplexity import Perplexity
from distill.evaluation.pseudo_perplexity import PseudoPerplexity
from distill.evaluation.sets import EvaluationSet
from distill.kernels.packed_linear import pack_for_evaluation
from distill.models.language_model import LanguageModel, OutputSpec
from distill.progress import Progress

SPEED_ROUNDS = 5

Scores = dict[str, dict[str, float]]  # by measure, then by evaluation set


class Evaluator:
    """Scores models on evaluation sets; each rank takes its share of the rows, the sums are exchanged."""

    def __init__(
        self, settings: EvaluateConfig, collator: MaskedLM, vocab: int, precision: PrecisionConfig, backend: Backend
    ) -> None:
        self.settings, self.precision, self.backend = settings, precision, backend
        self.scoring = Scoring(collator, vocab, settings.batch_size, backend)
        self.measures: list[Measure] = [Perplexity(self.scoring)]
        if settings.pseudo_perplexity.share > 0:
            self.measures.append(PseudoPerplexity(self.scoring, settings.pseudo_perplexity))

    def score(self, model: Any, label: str, sets: list[EvaluationSet]) -> Scores:
        """Every measure of a model on every set."""
        scores: Scores = {measure.name: {} for measure in self.measures}
        with self._scoring(model) as packed:
            for data in sets:
                for measure in self.measures:
                    what = f"{label}, {measure.title.lower()} on {data.name}"
                    with self._progress(what, measure.size(data), measure.unit) as done:
                        scores[measure.name][data.name] = measure.score(packed, data, done)
        return scores

    def agree(self, student: Any, teacher: Any, sets: list[EvaluationSet]) -> dict[str, dict[str, float]]:
        """`agreement` on every set."""
        scores = {}
        with self._scoring(student) as one, self._scoring(teacher) as other:
            for data in sets:
                with self._progress(f"agreement on {data.name}", data.num_rows, "rows") as done:
                    scores[data.name] = self.agreement(one, other, data, done)
        return scores

    def agreement(
        self, student: LanguageModel, teacher: LanguageModel, data: EvaluationSet, done: ProgressCallback
    ) -> dict[str, float]:
        """At the positions of perplexity: share of equal first choices, and mean KL(teacher || student) in nats."""
        sums = torch.zeros(3, dtype=torch.float64, device=self.backend.device)
        for batch in self.scoring.masked_batches(data, done):
            student_logits, teacher_logits = (
                self._logits(model, batch, batch.labels["mlm"].positions).float() for model in (student, teacher)
            )
            log_q, log_p = student_logits.log_softmax(-1), teacher_logits.log_softmax(-1)
            sums[0] += (student_logits.argmax(-1) == teacher_logits.argmax(-1)).sum()
            sums[1] += (log_p.exp() * (log_p - log_q)).sum(-1).double().sum()
            sums[2] += len(student_logits)
        top1, kl, count = self.backend.sum(sums).tolist()
        return {"top1": top1 / max(count, 1), "kl": kl / max(count, 1)}

    def describe(self, data: EvaluationSet) -> dict[str, Any]:
        """What the set holds and how many of its positions each measure scores, on all ranks."""
        targets = sum(len(batch.labels["mlm"].positions) for batch in self.scoring.masked_batches(data, lambda _: None))
        pseudo = [measure.size(data) for measure in self.measures if isinstance(measure, PseudoPerplexity)]
        return {
            "name": data.name,
            "description": data.description,
            "documents": data.documents,
            "rows": data.num_rows,
            "tokens": int((data.rows != self.scoring.collator.pad_id).sum()),
            "positions": int(self.backend.sum(torch.tensor(targets))),
            "pseudo_positions": sum(pseudo),
        }

    def tokens_per_second(self, models: list[Any], data: EvaluationSet) -> list[float]:
        """Positions per second of the whole forward, hidden states and head at every position, on one batch.

        The models take turns and the median round counts, so that what else the machine does meets them alike. All are
        laid out as for scoring: what training has made of the student's kernels gives it no advantage.
        """
        packed = [pack_for_evaluation(model, self.precision, self.backend.device) for model in models]
        ids = np.resize(data.rows.astype(np.int64), (self.settings.batch_size, data.rows.shape[1]))
        numbers = np.arange(len(ids))
        batch = self.scoring.collator.collate(ids, numbers.astype(np.uint64), numbers).to(self.backend.device)
        seconds: list[list[float]] = [[] for _ in models]
        for _ in range(SPEED_ROUNDS + 1):
            for model, times in zip(packed, seconds, strict=True):
                with _evaluating(model):
                    self._wait()
                    began = time.perf_counter()
                    self._logits(LanguageModel(model, self.precision.evaluate), batch, None)
                    self._wait()
                    times.append(time.perf_counter() - began)
        return [ids.size / float(np.median(times[1:])) for times in seconds]  # the first round warms up

    def _logits(self, model: LanguageModel, batch: Batch, positions: torch.Tensor | None) -> torch.Tensor:
        """[N, V] at flat positions of the batch; None: all of them."""
        rows = model(batch.inputs, batch.documents, OutputSpec(True, positions)).head_rows
        return model.logits(rows, self.scoring.vocab)

    @contextmanager
    def _progress(self, label: str, total: int, unit: str) -> Iterator[ProgressCallback]:
        """Rank 0 shows how far all ranks are, estimated from its own share."""
        progress = Progress(label, total, unit)
        count = 0

        def done(more: int) -> None:
            nonlocal count
            count += more * self.backend.size
            progress.update(min(count, total))

        yield done
        progress.close()

    @contextmanager
    def _scoring(self, model: Any) -> Iterator[LanguageModel]:
        """Gives `model` in evaluation mode and without gradients, laid out for many forward passes."""
        with _evaluating(model):
            packed = pack_for_evaluation(model, self.precision, self.backend.device)
            yield LanguageModel(packed, self.precision.evaluate)

    def _wait(self) -> None:
        if self.backend.device.type == "cuda":
            torch.cuda.synchronize(self.backend.device)


@contextmanager
def _evaluating(model: Any) -> Iterator[None]:
    """Evaluation mode without gradients, and back to the mode before."""
    training = model.training
    model.eval()
    try:
        with torch.inference_mode():
            yield
    finally:
        model.train(training)
