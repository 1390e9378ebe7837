"""Scores models: every measure on every set, and how alike student and teacher are."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor

from distill.config.settings import PrecisionConfig
from distill.data.sequence_store import outer_ids
from distill.distributed.shard import is_sharded
from distill.evaluation.measures import (
    KEPT_BYTES,
    Byproducts,
    KeptRows,
    Measure,
    Pass,
    ProgressCallback,
    Scoring,
    chunk_rows,
)
from distill.evaluation.measures.over_ranks import compute_metric, sum_exchange
from distill.evaluation.readers import Readers
from distill.evaluation.sets import EvaluationSet, SetContents
from distill.evaluation.significance import SequenceLosses
from distill.models.language_model import LanguageModel, idle_forward
from distill.runtime.errors import SettingError
from distill.runtime.progress import Progress, in_a_sentence

if TYPE_CHECKING:
    from distill.evaluation.measures.perplexity import SequenceLossSums

Scores = dict[str, dict[str, float]]  # by measure, then by evaluation set


class Evaluator:
    """Scores models on evaluation sets; each rank takes its part of the sequences, the sums are exchanged.

    Attributes:
        kept: head rows of `student` and `teacher`, those that `score` was to keep.
        measures: those of the task, the first of which decides which of two models is better, then the user's.
        readers: opens models for scoring, and counts the seconds that scoring takes.
    """

    def __init__(self, scoring: Scoring, passes: list[Pass], precision: PrecisionConfig) -> None:
        self.scoring, self.passes, self.ranks = scoring, passes, scoring.ranks
        self.readers = Readers(precision, scoring.ranks)
        of_task = [measure for scoring_pass in passes for measure in scoring_pass.measures]
        self.measures: list[Measure] = [
            *of_task,
            *(measure for scoring_pass in passes for measure in scoring_pass.user_measures),
        ]
        if taken := {measure.name for measure in of_task} & {*scoring.settings.measures}:
            name = min(taken)
            raise SettingError(f"evaluate.measures.{name}: this task measures {name} itself; give yours another name")
        self.kept: dict[str, KeptRows] = {}

    def score(self, model: Any, label: str, sets: list[EvaluationSet], keep: str | None = None) -> Scores:
        """Every measure of a model on every set.

        Args:
            keep: "student" or "teacher", under which `agree` finds what perplexity has computed. The model must not
                change in between.
        """
        return self._score(model, label, sets, keep, None)

    def score_by_sequence(
        self, model: Any, label: str, sets: list[EvaluationSet], keep: str | None = None
    ) -> tuple[Scores, dict[tuple[str, str], SequenceLosses]]:
        """`score`, and what each sequence contributes to every perplexity and accuracy, by measure and set."""
        losses: dict[tuple[str, str], SequenceLosses] = {}
        return self._score(model, label, sets, keep, losses), losses

    def forget(self, label: str) -> None:
        """Drop what `score` has kept of a model under this label, as it is about to change."""
        self.kept.pop(label, None)

    def agree(self, student: Any, teacher: Any, sets: list[EvaluationSet]) -> dict[str, dict[str, float]]:
        """Fraction of equal first choices (`top1`) and mean KL(teacher || student) in nats (`kl`), at all targets.

        What `score` has kept of the two models is not computed again.
        """
        scores = {}
        with (
            self.readers.timed(),
            self.ranks.in_lockstep([student, teacher], idle_forward),
            self.readers.opened(student) as one,
            self.readers.opened(teacher) as other,
        ):
            for data in sets:
                is_kept = all(data.name in kept.by_set for kept in self.kept.values()) and len(self.kept) == 2
                total = 0 if is_kept else data.num_sequences  # of what was computed before no rate is shown
                with self._progress(f"agreement on {data.name}", total, "sequences") as on_progress:
                    scores[data.name] = self._agreement(one, other, data, on_progress)
        return scores

    def describe(self, data: EvaluationSet) -> SetContents:
        """What the set holds and how many of its positions are scored, on all ranks."""
        by_measure = {one.measures[0].name: one for one in self.passes if one.measures}
        single = by_measure.get("pseudo_perplexity")
        return {
            "name": data.name,
            "description": data.description,
            "documents": data.documents,
            "sequences": data.num_sequences,
            "tokens": int((outer_ids(data.sequences) != self.scoring.collator_of(data).pad_id).sum()),
            "positions": self.passes[0].num_positions(data),
            "pseudo_positions": single.num_positions(data) if single else 0,
        }

    def _score(
        self,
        model: Any,
        label: str,
        sets: list[EvaluationSet],
        keep: str | None,
        losses: dict[tuple[str, str], SequenceLosses] | None,
    ) -> Scores:
        scores: Scores = {measure.name: {} for measure in self.measures}
        # The head of a sharded model is put together by each forward, and cannot be read without one.
        head_rows = None if keep is None or is_sharded(model) else KeptRows(KEPT_BYTES)
        with self.readers.timed(), self.readers.opened(model) as reader:
            for data in sets:
                for scoring_pass in self.passes:
                    if not scoring_pass.applies_to(data) or not scoring_pass.measures:
                        continue
                    summed = scoring_pass.by_sequence(data) if losses is not None else None
                    by_sequence = self._sequence_sums(data) if summed else None
                    title = in_a_sentence(scoring_pass.measures[0].title)
                    with self._progress(
                        f"{label}, {title} on {data.name}", scoring_pass.size(data), scoring_pass.unit
                    ) as on_progress:
                        values = scoring_pass.score(
                            reader,
                            data,
                            on_progress,
                            Byproducts(by_sequence, head_rows if scoring_pass.keeps_head_rows else None),
                        )
                    if summed and by_sequence is not None and losses is not None:
                        losses[summed, data.name] = by_sequence.result()
                    for name, value in values.items():
                        scores[name][data.name] = value
        if keep is not None and head_rows is not None:
            self.kept[keep] = head_rows
        return {name: values for name, values in scores.items() if values or not sets}

    def _sequence_sums(self, data: EvaluationSet) -> "SequenceLossSums":
        from distill.evaluation.measures.perplexity import SequenceLossSums

        return SequenceLossSums(data.num_sequences, **sum_exchange(self.ranks)).to(self.ranks.device)

    def _agreement(
        self, student: LanguageModel, teacher: LanguageModel, data: EvaluationSet, on_progress: ProgressCallback
    ) -> dict[str, float]:
        from distill.evaluation.measures.agreement import Agreement

        metric = Agreement(**sum_exchange(self.ranks)).to(self.ranks.device)
        vocab = self.scoring.vocab
        size = chunk_rows(vocab)
        parts = (self._head_rows("student", student, data), self._head_rows("teacher", teacher, data))
        for both in zip(*parts, strict=True):
            for student_rows, teacher_rows in zip(*(rows.split(size) for rows in both), strict=True):
                logits = student.logits(student_rows, vocab).float(), teacher.logits(teacher_rows, vocab).float()
                shared = min(part.shape[1] for part in logits)  # one may have a few special tokens more
                metric.update(*(part[:, :shared] for part in logits))
            on_progress(self.scoring.settings.batch_size)
        values: dict[str, float] = compute_metric(metric)
        return values

    def _head_rows(self, which: str, model: LanguageModel, data: EvaluationSet) -> Iterator[Tensor]:
        """What the model's head is given at the targets of each batch, [N, E]: kept ones, or computed."""
        batches = self.kept[which].by_set.get(data.name) if which in self.kept else None
        if batches is not None:
            yield from batches
        else:
            yield from (rows for _, rows in self.scoring.head_rows(model, data, lambda _: None))

    @contextmanager
    def _progress(self, label: str, total: int, unit: str) -> Iterator[ProgressCallback]:
        """Rank 0 shows how far all ranks are, estimated from its own part; nothing where there is no work."""
        if not total:
            yield lambda scored: None
            return
        progress = Progress(label, total, unit)
        count = 0

        def on_progress(scored: int) -> None:
            nonlocal count
            count += scored * self.ranks.size
            progress.update(min(count, total))

        try:
            yield on_progress
        finally:
            progress.close()
