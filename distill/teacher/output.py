"""What a teacher gives for a micro-batch, whether it runs live or is read from a cache."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from distill.data.batch import Batch
from distill.models.language_model import NO_OUTPUTS, Head, Outputs, OutputSpec
from distill.teacher.distributions import Distribution, Mixture

CHECKED_ROWS = 64  # whose logits exist at once

# What the objective requests of the teacher for a micro-batch.
Wanted = Callable[[Batch], OutputSpec]


class TeacherOutput(NamedTuple):
    """What a teacher gives for one micro-batch.

    Attributes:
        distribution: over the vocabulary at the N requested positions, for losses on logits; None: none was requested.
        outputs: hidden states and more; empty where none were requested.
    """

    distribution: Distribution | None
    outputs: Outputs


def is_finite(output: TeacherOutput) -> bool:
    """Whether logits and hidden states are finite; scores of attention, which are masked by -inf, are not looked at."""
    outputs = output.outputs
    inner = (outputs.hidden, outputs.pooled, outputs.extra, outputs.last_rows)
    return all(bool(tensor.isfinite().all()) for tensor in _tensors((output.distribution, inner)))


def _tensors(value: Any) -> Iterator[Tensor]:
    """All tensors of floating-point numbers in a nested value; of a head its logits, in chunks."""
    if isinstance(value, Head):
        weight, rows = value.weight if value.rounded is None else value.rounded, value.rows.to(value.dtype)
        for chunk in rows.split(CHECKED_ROWS):
            product = value.cap(chunk @ weight.to(rows.dtype).t())
            yield product if value.bias is None else product + value.bias
    elif isinstance(value, Tensor):
        yield from (value,) if value.is_floating_point() else ()
    elif isinstance(value, Mapping | tuple):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(part)


class Teacher(Protocol):
    """A frozen model, or what is kept of one. Nothing outside of this package depends on which it is."""

    def read_ahead(self, batch: Batch) -> Batch:
        """The batch with what can be read before its step; called in the threads that prepare batches."""
        ...

    def outputs(self, window: list[Batch], spec_of: Wanted) -> Iterator[TeacherOutput]:
        """What the teacher gives for each micro-batch of a window, in order."""
        ...


class NoTeacher:
    """The teacher of a run without one: it gives nothing, and the objective has no term that would need it."""

    def read_ahead(self, batch: Batch) -> Batch:
        return batch

    def outputs(self, window: list[Batch], spec_of: Wanted) -> Iterator[TeacherOutput]:
        return (TeacherOutput(None, NO_OUTPUTS) for _ in window)


class MeanTeacher:
    """Several teachers as one: the weighted mean of their distributions, and the hidden states of the first alone."""

    def __init__(self, members: Sequence[Teacher], weights: Sequence[float]) -> None:
        """`weights`: above 0, of any sum."""
        self.members = members
        self.weights = tuple(weight / sum(weights) for weight in weights)

    def read_ahead(self, batch: Batch) -> Batch:
        for member in self.members:
            batch = member.read_ahead(batch)
        return batch

    def outputs(self, window: list[Batch], spec_of: Wanted) -> Iterator[TeacherOutput]:
        def logits_alone(batch: Batch) -> OutputSpec:
            return OutputSpec(spec_of(batch).head, spec_of(batch).positions)

        first, *others = self.members
        streams = [first.outputs(window, spec_of), *(member.outputs(window, logits_alone) for member in others)]
        for outputs in zip(*streams, strict=True):
            found = [output.distribution for output in outputs if output.distribution is not None]
            yield TeacherOutput(Mixture(tuple(found), self.weights) if found else None, outputs[0].outputs)
