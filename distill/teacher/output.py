"""What a teacher gives for a micro-batch, whether it runs live or is read from a cache."""

from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

from distill.data.batch import Batch
from distill.models.language_model import NO_OUTPUTS, Outputs, OutputSpec
from distill.teacher.distributions import Distribution

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
        for _ in window:
            yield TeacherOutput(None, NO_OUTPUTS)
