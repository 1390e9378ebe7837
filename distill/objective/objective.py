"""The combined objective: named, weighted loss terms, each over its own global count.

total = sum over the terms of weight * (sum of the term over its positions) / (its count over the whole step). The
counts are taken over all micro-batches and ranks of the step before the first backward. So the gradient is the same for
every split of the step's rows, and padding or uneven masks weigh nothing.

Shapes: B rows, S positions, N rows that reach the head, T terms.
"""

import torch
from torch import Tensor, nn

from distill.data.batch import Batch
from distill.models.language_model import Head, OutputSpec
from distill.objective.blocks import NO_TARGET
from distill.objective.tally import TOKENS
from distill.objective.terms import ALL, Term, VocabularyTerm
from distill.objective.trainable import Trainable
from distill.objective.vocabulary import reference_loss, vocabulary_loss
from distill.teacher.signal import Signal


class Objective:
    """The loss terms of a run.

    Attributes:
        names: of the terms, in the order of every vector [T] of this class.
        needs_teacher: whether any term does.
    """

    def __init__(
        self, terms: dict[str, Term], weights: dict[str, float], vocab: int, plain: bool = False, compiled: bool = False
    ) -> None:
        """`plain`: by all logits, readable, instead of in chunks; `compiled`: the chunks through torch.compile."""
        self.terms, self.weights = terms, {name: weights[name] for name in terms}
        self.vocab, self.plain, self.compiled = vocab, plain, compiled
        self.names = tuple(terms)
        self.needs_teacher = any(term.needs_teacher for term in terms.values())
        self._vocabulary = {name: term for name, term in terms.items() if isinstance(term, VocabularyTerm)}

    def modules(self) -> dict[str, nn.Module]:
        """What is trained beside the student, by term."""
        return {name: term.module for name, term in self.terms.items() if term.module is not None}

    def count(self, window: list[Batch]) -> Tensor:
        """Positions that carry each term in these micro-batches, and tokens: [T + 1] float64."""
        counts = [sum(term.count(batch) for batch in window) for term in self.terms.values()]
        return torch.tensor([*counts, sum(batch.num_valid for batch in window)], dtype=torch.float64)

    def by_name(self, values: list[float]) -> dict[str, float]:
        """A vector [T] or [T + 1] of this class as numbers by name."""
        return dict(zip((*self.names, TOKENS), values, strict=False))

    def scales(self, counts: Tensor, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
        """What each term's sum is multiplied by in a step with these counts: [T], weight / count."""
        weights = torch.tensor([self.weights[name] for name in self.names])
        return (weights / counts[: len(self.names)].clamp(min=1)).to(device, dtype)

    @property
    def vocabulary_terms(self) -> list[VocabularyTerm]:
        """Those on logits."""
        return list(self._vocabulary.values())

    @property
    def top_k_temperature(self) -> float | None:
        """At which a cache keeps the teacher's probabilities; None where no term can read a cache."""
        found = (term.top_k_temperature for term in self._vocabulary.values())
        return next((temperature for temperature in found if temperature is not None), None)

    @property
    def visits_all_rows(self) -> bool:
        """Whether every non-padding position reaches the head; else only those with a target do."""
        return any(term.rows == ALL for term in self._vocabulary.values())

    def positions(self, batch: Batch) -> Tensor | None:
        """Flat positions of the batch that reach the head, [N]; None: all of them."""
        if self.visits_all_rows:
            return batch.valid_positions
        (rows,) = {term.rows for term in self._vocabulary.values()}
        return batch.labels[rows].positions

    def student_spec(self, batch: Batch) -> OutputSpec:
        """What is wanted of the student's forward."""
        layers = sorted({layer for term in self.terms.values() for layer in term.student_layers})
        return OutputSpec(bool(self._vocabulary), self.positions(batch) if self._vocabulary else None, tuple(layers))

    def teacher_spec(self, batch: Batch) -> OutputSpec:
        """What is wanted of the teacher."""
        layers = sorted({layer for term in self.terms.values() for layer in term.teacher_layers})
        wants_logits = any(term.needs_teacher for term in self._vocabulary.values())
        return OutputSpec(wants_logits, self.positions(batch) if wants_logits else None, tuple(layers))

    def __call__(self, model: Trainable, signal: Signal, batch: Batch, scales: Tensor) -> tuple[Tensor, Tensor]:
        """This micro-batch's share of the step's loss, and the sums of the terms, [T], detached."""
        outputs = model(batch.inputs, batch.documents, self.student_spec(batch))
        loss = scales.new_zeros(())
        sums: dict[str, Tensor] = {}
        if self._vocabulary:
            assert outputs.head_rows is not None
            loss, found = self._vocabulary_loss(model.student.head(outputs.head_rows), signal, batch, scales)
            sums |= dict(zip(self._vocabulary, found, strict=True))
        for number, (name, term) in enumerate(self.terms.items()):
            if name not in self._vocabulary:
                term_sum = term.loss_sum(outputs, signal, batch)
                loss = loss + scales[number] * term_sum
                sums[name] = term_sum.detach().to(scales.dtype)
        return loss, torch.stack([sums[name] for name in self.names])

    def _vocabulary_loss(self, head: Head, signal: Signal, batch: Batch, scales: Tensor) -> tuple[Tensor, Tensor]:
        """The terms over the vocabulary: their scaled sum, and the unscaled sums."""
        terms = list(self._vocabulary.values())
        own = torch.stack([scales[self.names.index(name)] for name in self._vocabulary])
        targets = self._targets(batch)
        if self.plain:
            return reference_loss(terms, head, signal.logits_source, targets, own, self.vocab)
        return vocabulary_loss(terms, head, signal.logits_source, targets, own, self.vocab, self.compiled)

    def _targets(self, batch: Batch) -> Tensor:
        """The token to predict in each row that reaches the head, [N]; NO_TARGET where there is none."""
        ((positions, targets),) = batch.labels.values()
        selected = self.positions(batch)
        if selected is positions:
            return targets
        flat = torch.full((batch.ids.numel(),), NO_TARGET, device=targets.device)
        flat[positions] = targets
        return flat if selected is None else flat.index_select(0, selected)
