"""The combined objective: named, weighted loss terms, each over its own global count.

total = sum over the terms of weight * (sum of the term over its positions) / (its count over the whole step). The
counts are taken over all micro-batches and ranks of the step before the first backward. So the gradient is the same for
every split of the step's sequences, and padding or uneven masks weigh nothing.

Shapes: B sequences, S positions, N positions that reach the head, T terms.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from distill.config.objective import WeightSchedule, value_at
from distill.data.batch import Batch
from distill.models.language_model import Head, OutputSpec, union
from distill.objective.chunked import NO_TARGET, ChunkedLosses
from distill.objective.running_mean import TOKENS
from distill.objective.terms import ALL, Term, VocabularyTerm
from distill.objective.trainable import Trainable
from distill.runtime.errors import SettingError
from distill.runtime.users_code import is_users, naming_mistakes
from distill.teacher.distributions import Mixture
from distill.teacher.output import TeacherOutput


class Objective:
    """The loss terms of a run.

    Attributes:
        terms: by name, with what is in force in the current step of all that follows a schedule.
        names: of the terms, in the order of every vector [T] of this class.
        needs_teacher: whether any term does.
        weights: of the terms, in force in the current step.
        scheduled_weights: the same over the run.
        temperatures: of the terms whose temperature follows a schedule.
    """

    def __init__(
        self,
        terms: dict[str, Term],
        weights: Mapping[str, float | WeightSchedule],
        vocab: int,
        temperatures: Mapping[str, WeightSchedule] | None = None,
        compiled: bool = False,
    ) -> None:
        """
        Args:
            weights: by term; a WeightSchedule where it changes over the run.
            temperatures: by term, where it follows a schedule.
            compiled: whether what is written by hand goes through torch.compile.
        """
        self.terms, self.vocab, self.compiled = dict(terms), vocab, compiled
        self.names = tuple(terms)
        self.needs_teacher = any(term.needs_teacher for term in terms.values())
        self.scheduled_weights = {name: weights[name] for name in terms}
        self.temperatures = {name: schedule for name, schedule in (temperatures or {}).items() if name in terms}
        self.begin_step(0.0)

    def begin_step(self, progress: float) -> None:
        """From now on weights and temperatures are those at `progress` of the run, from 0 to 1."""
        self.weights = {name: value_at(weight, progress) for name, weight in self.scheduled_weights.items()}
        for name, schedule in self.temperatures.items():
            self.terms[name] = self.terms[name].at_temperature(schedule(progress))
        self._vocabulary = {name: term for name, term in self.terms.items() if isinstance(term, VocabularyTerm)}
        on_logits, all_rows = list(self._vocabulary.values()), self.visits_all_rows
        self._in_chunks = ChunkedLosses(on_logits, self.vocab, self.compiled, all_rows=all_rows)

    def scheduled(self) -> dict[str, float]:
        """What is in force of all that follows a schedule, for the metrics of a step."""
        scheduled = [name for name, weight in self.scheduled_weights.items() if isinstance(weight, WeightSchedule)]
        return {
            **{f"weight/{name}": self.weights[name] for name in scheduled},
            **{f"temperature/{name}": self.terms[name].temperature for name in self.temperatures},
        }

    def modules(self) -> dict[str, nn.Module]:
        """What is trained beside the student, by term."""
        return {name: term.module for name, term in self.terms.items() if term.module is not None}

    def count(self, window: list[Batch]) -> Tensor:
        """Positions that carry each term in these micro-batches, and tokens: [T + 1] float64."""
        counted = [batch for batch in window if not batch.is_dummy]
        counts = []
        for name, term in self.terms.items():
            with naming_mistakes(f"objective.{name}: count() of {type(term).__name__}", term):
                counts.append(sum(term.count(batch) for batch in counted))
        return torch.tensor([*counts, sum(batch.num_valid for batch in counted)], dtype=torch.float64)

    def by_name(self, values: list[float]) -> dict[str, float]:
        """A vector [T] or [T + 1] of this class as numbers by name."""
        return dict(zip((*self.names, TOKENS), values, strict=False))

    def scales(self, counts: Tensor, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
        """What each term's sum is multiplied by in a step with these counts: [T], weight / count."""
        weights = torch.tensor([self.weights[name] for name in self.names])
        return (weights / counts[: len(self.names)].clamp(min=1)).to(dtype).to(device, non_blocking=True)

    @property
    def top_k_temperature(self) -> float | None:
        """At which a cache keeps the teacher's probabilities; None where no term can read a cache."""
        temperatures = (term.top_k_temperature for term in self._vocabulary.values())
        return next((temperature for temperature in temperatures if temperature is not None), None)

    @property
    def visits_all_rows(self) -> bool:
        """Whether every non-padding position reaches the head; else only those with a target do."""
        return reads_all_rows(self.terms.values())

    def positions(self, batch: Batch) -> Tensor | None:
        """Flat positions of the batch that reach the head, [N]; None: all of them."""
        if self.visits_all_rows:
            return batch.valid_positions
        return batch.targets.positions

    @property
    def reads_whole_states(self) -> bool:
        """Whether a term reads hidden states of the teacher at every non-padding position."""
        return any(term.teacher_reads.layers for term in self.terms.values())

    def state_positions(self, batch: Batch) -> Tensor | None:
        """Flat positions [N] at which the teacher's last hidden state is read, be it by the head; None: all of them."""
        return batch.valid_positions if self.reads_whole_states else self.positions(batch)

    def student_spec(self, batch: Batch) -> OutputSpec:
        """What the student's forward is to give."""
        return self._spec(batch, [term.student_reads for term in self.terms.values()], bool(self._vocabulary))

    def teacher_spec(self, batch: Batch) -> OutputSpec:
        """What the teacher is to give."""
        on_logits = any(term.needs_teacher for term in self._vocabulary.values())
        return self._spec(batch, [term.teacher_reads for term in self.terms.values()], on_logits)

    def _spec(self, batch: Batch, reads: list[OutputSpec], on_logits: bool) -> OutputSpec:
        inner = union(reads)
        head = inner.head or on_logits
        return inner._replace(head=head, positions=self.positions(batch) if head or inner.last_rows else None)

    def __call__(self, model: Trainable, teacher: TeacherOutput, batch: Batch, scales: Tensor) -> tuple[Tensor, Tensor]:
        """This micro-batch's part of the step's loss, and the sums of the terms, [T], detached."""
        outputs = model(batch.inputs, batch.documents, self.student_spec(batch))
        loss = scales.new_zeros(())
        sums: dict[str, Tensor] = {}
        if outputs.head_rows is not None:
            outputs = outputs._replace(head=model.student.head(outputs.head_rows))
        if self._vocabulary:
            assert outputs.head is not None
            mine = {name: term for name, term in self._vocabulary.items() if is_users(type(term).__module__)}
            what = f"objective.{', objective.'.join(mine)}: losses()"
            with naming_mistakes(what, next(iter(mine.values()), self)):
                loss, on_logits = self._vocabulary_loss(outputs.head, teacher, batch, scales)
            sums |= dict(zip(self._vocabulary, on_logits, strict=True))
        for number, (name, term) in enumerate(self.terms.items()):
            if name not in self._vocabulary:
                with naming_mistakes(f"objective.{name}: loss_sum() of {type(term).__name__}", term):
                    term_sum = term.loss_sum(outputs, teacher, batch) * (not batch.is_dummy)
                loss = loss + scales[number] * term_sum
                sums[name] = term_sum.detach().to(scales.dtype)
        return loss, torch.stack([sums[name] for name in self.names])

    def _vocabulary_loss(
        self, head: Head, teacher: TeacherOutput, batch: Batch, scales: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The terms over the vocabulary: their scaled sum, and the unscaled sums."""
        mixture = Mixture.of(teacher.distribution)
        if len(mixture.members) > 1:
            mixture = mixture._replace(temperature=mixing_temperature(self._vocabulary))
        of_terms = torch.stack([scales[self.names.index(name)] for name in self._vocabulary])
        return self._in_chunks(head, mixture, self._targets(batch), of_terms)

    def _targets(self, batch: Batch) -> Tensor:
        """The token to predict at each position that reaches the head, [N]; NO_TARGET where there is none."""
        positions, targets = batch.targets
        selected = self.positions(batch)
        if selected is positions:
            return targets
        flat = torch.full((batch.ids.numel(),), NO_TARGET, device=targets.device)
        flat[positions] = targets
        return flat if selected is None else flat.index_select(0, selected)


def reads_all_rows(terms: Iterable[Term]) -> bool:
    """Whether a term needs the head at every non-padding position, as those do that read it for themselves."""
    return any(
        term.student_reads.head
        or term.teacher_reads.head
        or (isinstance(term, VocabularyTerm) and term.positions == ALL)
        for term in terms
    )


def mixing_temperature(terms: Mapping[str, VocabularyTerm], scheduled: Mapping[str, Any] | None = None) -> float:
    """At which the probabilities of several teachers are averaged: that of the terms, by name, which read them.

    Args:
        scheduled: the temperatures that follow a schedule, which have to be the same over the whole run.

    Raises:
        SettingError: two of them have different ones.
    """
    temperatures: dict[str, Any] = {
        name: (scheduled or {}).get(name) or getattr(term, "temperature", 1.0)
        for name, term in terms.items()
        if term.needs_teacher and term.reads_probabilities
    }
    if len(set(temperatures.values())) > 1:
        values = ", ".join(f"objective.{name}.temperature={value}" for name, value in temperatures.items())
        raise SettingError(
            f"teacher.members averages probabilities at one temperature, but there are {values}: give them the "
            "same (a term of your own that takes no temperature reads them at 1)"
        )
    first: float = next(iter(temperatures.values()), 1.0)
    return first
