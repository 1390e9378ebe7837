"""Scores models: every measure on every set, how alike student and teacher are, and how fast each runs.

Shapes: N positions scored, V vocabulary.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch

from distill.config.settings import EvaluateConfig, PrecisionConfig
from distill.data.batch import Batch
from distill.distributed.formats import computing_in
from distill.distributed.shard import is_sharded
from distill.evaluation.measures import KEPT_BYTES, LOGITS_BYTES, Measure, ProgressCallback, Scoring
from distill.evaluation.mixture import pack, reader
from distill.evaluation.own_measures import make_measures
from distill.evaluation.pseudo_perplexity import PseudoPerplexity
from distill.evaluation.rehearsal import rehearse
from distill.evaluation.sets import EvaluationSet
from distill.models.kernels.precision import dtype_of
from distill.models.language_model import LanguageModel, OutputSpec, idle_forward
from distill.runtime.progress import Progress

SPEED_ROUNDS = 5
SPEED_POSITIONS = 65_536  # of the batch that each round computes, at most ...
SPEED_POSITIONS_OF_THREAD = 1_024  # ... and on the CPU, where so many keep a thread busy

Scores = dict[str, dict[str, float]]  # by measure, then by evaluation set


class Evaluator:
    """Scores models on evaluation sets; each rank takes its share of the rows, the sums are exchanged."""

    def __init__(
        self, settings: EvaluateConfig, scoring: Scoring, measures: list[Measure], precision: PrecisionConfig
    ) -> None:
        self.settings, self.scoring, self.precision, self.backend = settings, scoring, precision, scoring.backend
        self.own = measures  # of the task
        self.measures = [*measures, *make_measures(settings.measures, scoring)]
        self.seconds = 0.0  # that scoring has taken so far
        self.kept: dict[str, dict[str, list[torch.Tensor]]] = {}  # of student and teacher, by set: see `score`

    def score(self, model: Any, label: str, sets: list[EvaluationSet], keep: str | None = None) -> Scores:
        """Every measure of a model on every set.

        Args:
            keep: "student" or "teacher", as which `agree` finds again what perplexity has computed. The model may not
                change in between.
        """
        scores: Scores = {measure.name: {} for measure in self.measures}
        # The head of a divided model is put together by its forward, which agreement then needs anyway.
        keeping = nullcontext() if keep is None or is_sharded(model) else self._keeping(keep)
        with self._timed(), self._scoring(model) as packed, keeping:
            for data in sets:
                for measure in self.measures:
                    what = f"{label}, {measure.title.lower()} on {data.name}"
                    with self._progress(what, measure.size(data), measure.unit) as done:
                        value = measure.score(packed, data, done)
                    if value is not None:
                        scores[measure.name][data.name] = value
        return {name: values for name, values in scores.items() if values or not sets}

    def score_one(self, model: Any, measure: Measure, data: EvaluationSet) -> float | None:
        """One measure of a model on one set."""
        with self._timed(), self._scoring(model) as packed:
            return measure.score(packed, data, lambda count: None)

    def agree(self, student: Any, teacher: Any, sets: list[EvaluationSet]) -> dict[str, dict[str, float]]:
        """`agreement` on every set. What `score` has kept of the two models is not computed again."""
        scores = {}
        with (
            self._timed(),
            self.backend.in_lockstep([student, teacher], idle_forward),
            self._scoring(student) as one,
            self._scoring(teacher) as other,
        ):
            for data in sets:
                kept = tuple(self.kept.get(which, {}).get(data.name) for which in ("student", "teacher"))
                with self._progress(f"agreement on {data.name}", data.num_rows, "rows") as done:
                    scores[data.name] = self.agreement(one, other, data, done, kept)
        return scores

    def agreement(
        self,
        student: LanguageModel,
        teacher: LanguageModel,
        data: EvaluationSet,
        done: ProgressCallback,
        kept: tuple[list[torch.Tensor] | None, ...] = (None, None),
    ) -> dict[str, float]:
        """At positions with a target: share of equal first choices, and mean KL(teacher || student) in nats.

        Args:
            kept: the head rows of student and teacher, batch by batch; None: the model computes them.
        """
        sums = torch.zeros(3, dtype=torch.float64, device=self.backend.device)
        size = max(1, LOGITS_BYTES // (8 * self.scoring.vocab))
        each = [
            (rows for _, rows in self.scoring.head_rows(model, data, lambda _: None)) if known is None else known
            for model, known in zip((student, teacher), kept, strict=True)
        ]
        for both in zip(*each, strict=True):
            for student_rows, teacher_rows in zip(*(rows.split(size) for rows in both), strict=True):
                student_logits = student.logits(student_rows, self.scoring.vocab).float()
                teacher_logits = teacher.logits(teacher_rows, self.scoring.vocab).float()
                log_q, log_p = student_logits.log_softmax(-1), teacher_logits.log_softmax(-1)
                sums[0] += (student_logits.argmax(-1) == teacher_logits.argmax(-1)).sum()
                sums[1] += (log_p.exp() * (log_p - log_q)).sum(-1).double().sum()
                sums[2] += len(student_logits)
            done(self.scoring.batch_size)
        top1, kl, count = self.backend.sum(sums).tolist()
        if not count:
            return {"top1": float("nan"), "kl": float("nan")}
        return {"top1": top1 / count, "kl": kl / count}

    def describe(self, data: EvaluationSet) -> dict[str, Any]:
        """What the set holds and how many of its positions each measure scores, on all ranks."""
        # Of the task's own measures: those of the user's need not count positions.
        positions = {measure.name: measure.num_positions(data) for measure in self.own}
        return {
            "name": data.name,
            "description": data.description,
            "documents": data.documents,
            "rows": data.num_rows,
            "tokens": int((data.rows != self.scoring.collator_of(data).pad_id).sum()),
            "positions": positions[self.own[0].name],
            "pseudo_positions": positions.get("pseudo_perplexity", 0),
        }

    @contextmanager
    def _keeping(self, which: str) -> Iterator[None]:
        """What the measures leave in `scoring.kept` is that of this model from then on."""
        self.kept.pop(which, None)
        kept = self.scoring.kept
        kept.wanted, kept.by_set, kept.room = True, {}, KEPT_BYTES
        try:
            yield
            self.kept[which] = kept.by_set
        finally:
            kept.wanted, kept.by_set = False, {}

    @contextmanager
    def _timed(self) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds += time.perf_counter() - began

    def tokens_per_second(self, models: list[Any], data: EvaluationSet) -> list[float]:
        """Positions per second of the whole forward, hidden states and heads at every position, on one batch.

        The models take turns and the median round counts, so that what else the machine does meets them alike. All are
        laid out as for scoring: what training has made of the student's kernels gives it no advantage.
        """
        packed = [pack(model, self.precision, self.backend.device) for model in models]
        batch = self._full_rows(data, self._speed_rows(data))
        seconds: list[list[float]] = [[] for _ in models]
        for _ in range(SPEED_ROUNDS + 1):
            for model, times in zip(packed, seconds, strict=True):
                with self._timed(), self._evaluating(model):
                    self._wait()
                    began = time.perf_counter()
                    self._run(reader(model, self.precision), batch)
                    self._wait()
                    times.append(time.perf_counter() - began)
        return [batch.ids.numel() / float(np.median(times[1:])) for times in seconds]  # the first round warms up

    def rehearse(self, models: list[Any], sets: list[EvaluationSet]) -> None:
        """Compute the largest batches of evaluation once by each model, one model after the other.

        These are the batch by which speed is measured, one of the set with the longest rows, of which
        every measure computes logits in parts, and that of pseudo-perplexity. What two models hold side by side where
        their agreement is scored is not covered, nor are the user's own measures.

        Raises:
            SettingError: the memory of a rank does not suffice; it names the setting to lower.
        """
        if not sets:
            return
        with self._timed():
            self._rehearse_all(models, sets)

    def _rehearse_all(self, models: list[Any], sets: list[EvaluationSet]) -> None:
        first, longest = sets[0], max(sets, key=lambda data: data.rows.shape[1])
        setting, value = "evaluate.batch_size", self.settings.batch_size
        rows, vocab = self._speed_rows(first), 0 if self.scoring.heads else self.scoring.vocab
        least = self._least_bytes(models, rows * first.rows.shape[1], vocab)
        self._rehearse(models, lambda model: self._run(model, self._full_rows(first, rows)), least, setting, value)
        if longest is not first or rows < value:
            least = self._least_bytes(models, value * longest.rows.shape[1])
            self._rehearse(
                models, lambda model: self._run(model, self._full_rows(longest, value), False), least, setting, value
            )
        for measure in self.own:
            if isinstance(measure, PseudoPerplexity):
                copies = measure.largest_batch(longest)
                run = (lambda model: None) if copies is None else partial(measure.logits, copies=copies)
                positions = 0 if copies is None else len(copies.row) * copies.rows.shape[1]
                setting, rows = "evaluate.pseudo_perplexity.batch_size", measure.settings.batch_size
                least = self._least_bytes(models, positions)
                self._rehearse(models, run, least, setting, rows)

    def _rehearse(
        self, models: list[Any], run: Callable[[LanguageModel], object], least: int, setting: str, value: int
    ) -> None:
        def run_all() -> None:
            for model in models:
                with self._scoring(model) as packed:
                    run(packed)

        rehearse(run_all, least, setting, value, self.backend)

    def _least_bytes(self, models: list[Any], positions: int, vocab: int = 0) -> int:
        """What ids, hidden states and logits of that many take at least."""
        widths = [getattr(getattr(model, "config", None), "hidden_size", None) for model in models]
        width = max((each for each in widths if isinstance(each, int)), default=0)
        return positions * (8 + dtype_of(self.precision.evaluate).itemsize * (width + vocab))

    def _speed_rows(self, data: EvaluationSet) -> int:
        """As many rows as are scored at once, but no more than it takes to keep a device busy."""
        on_cpu = self.backend.device.type == "cpu"
        most = SPEED_POSITIONS_OF_THREAD * torch.get_num_threads() if on_cpu else SPEED_POSITIONS
        return min(self.settings.batch_size, max(1, most // data.rows.shape[1]))

    def _full_rows(self, data: EvaluationSet, count: int) -> Batch:
        """That many rows of full length."""
        ids = np.resize(data.rows[:count].astype(np.int64), (count, data.rows.shape[1]))
        numbers = np.arange(len(ids)) % data.num_rows
        collator = self.scoring.collator_of(data)
        return collator.collate(ids, np.arange(len(ids), dtype=np.uint64), numbers).to(self.backend.device)

    def _run(self, model: LanguageModel, batch: Batch, logits: bool = True) -> None:
        """Everything that a model computes for a batch; without `logits` those over the vocabulary are left out."""
        if self.scoring.heads:
            model(batch.inputs, batch.documents, OutputSpec(extra=self.scoring.heads))
            return
        rows = model(batch.inputs, batch.documents, OutputSpec(True)).head_rows
        if logits:
            model.logits(rows, self.scoring.vocab)

    @contextmanager
    def _progress(self, label: str, total: int, unit: str) -> Iterator[ProgressCallback]:
        """Rank 0 shows how far all ranks are, estimated from its own share; nothing of what is no work at all."""
        if not total:
            yield lambda more: None
            return
        progress = Progress(label, total, unit)
        count = 0

        def done(more: int) -> None:
            nonlocal count
            count += more * self.backend.size
            progress.update(min(count, total))

        try:
            yield done
        finally:
            progress.close()

    @contextmanager
    def _scoring(self, model: Any) -> Iterator[LanguageModel]:
        """Gives `model` in evaluation mode and without gradients, laid out for many forward passes."""
        with self._evaluating(model), self.backend.in_lockstep([model], idle_forward):
            yield reader(pack(model, self.precision, self.backend.device), self.precision)

    @contextmanager
    def _evaluating(self, model: Any) -> Iterator[None]:
        """Evaluation mode without gradients, in the format of evaluation, and back to what was before."""
        training, divided = model.training, is_sharded(model)
        model.eval()
        try:
            # The parts of a divided model are put together into tensors that training goes on with.
            with (
                torch.no_grad() if divided else torch.inference_mode(),
                computing_in(model, dtype_of(self.precision.evaluate)) if divided else nullcontext(),
            ):
                yield
        finally:
            model.train(training)

    def _wait(self) -> None:
        if self.backend.device.type == "cuda":
            torch.cuda.synchronize(self.backend.device)
