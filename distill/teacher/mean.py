"""Several teachers as one: the weighted mean of their distributions."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from distill.data.batch import Batch
from distill.models.language_model import OutputSpec
from distill.teacher.distributions import Mixture
from distill.teacher.output import Teacher, TeacherOutput, Wanted


class MeanTeacher:
    """Reads the distribution of every member, and the hidden states of the first one alone.

    A single member gives what it gives by itself, to the bit.
    """

    def __init__(self, members: Sequence[Teacher], weights: Sequence[float]) -> None:
        """`weights`: above 0, of any sum."""
        self.members = members
        self.weights = tuple(weight / sum(weights) for weight in weights)

    def read_ahead(self, batch: Batch) -> Batch:
        read = {
            f"{number}.{name}": tensor
            for number, member in enumerate(self.members)
            for name, tensor in member.read_ahead(batch).teacher_data.items()
        }
        return batch.with_teacher_data(**read)

    def outputs(self, window: list[Batch], spec_of: Wanted) -> Iterator[TeacherOutput]:
        streams = [
            member.outputs(
                [_of_member(batch, number) for batch in window], _without_layers(spec_of) if number else spec_of
            )
            for number, member in enumerate(self.members)
        ]
        for parts in zip(*streams, strict=True):
            yield parts[0] if len(parts) == 1 else TeacherOutput(self._mixture(parts), parts[0].outputs)

    def _mixture(self, parts: Sequence[TeacherOutput]) -> Mixture | None:
        members = [member for part in parts for member in Mixture.of(part.distribution).members]
        return Mixture(tuple(members), self.weights) if members else None


def _of_member(batch: Batch, number: int) -> Batch:
    """The batch as that member's `read_ahead` left it."""
    start = f"{number}."
    data = {name.removeprefix(start): value for name, value in batch.teacher_data.items() if name.startswith(start)}
    return replace(batch, teacher_data=data)


def _without_layers(spec_of: Wanted) -> Wanted:
    """The request for logits alone, without anything inside of the model."""

    def wanted_of_logits(batch: Batch) -> OutputSpec:
        spec = spec_of(batch)
        return OutputSpec(spec.head, spec.positions)

    return wanted_of_logits
