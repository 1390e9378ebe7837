"""Several teachers of a mixture, each of the sequences of its own sources.

Shapes: B sequences of S positions, N requested ones; K teachers, C sources.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from distill.data.batch import Batch
from distill.models.language_model import NO_OUTPUTS, OutputSpec
from distill.teacher.distributions import Mixture
from distill.teacher.output import Teacher, TeacherOutput, Wanted

LENGTHS = "document_lengths"


class TeachersBySource:
    """Live teachers as one: of each sequence the weighted mean of those that teach its source.

    A teacher reads these sequences alone, and one for nothing in a micro-batch that has none of them.
    """

    def __init__(self, members: Sequence[Teacher], weights: np.ndarray, offsets: np.ndarray) -> None:
        """
        Args:
            weights: [K, C], 0 where a teacher does not teach a source; each source has one above 0.
            offsets: [C + 1], the number of each source's first sequence, as `Batch.row_ids` counts them.
        """
        self.members, self.weights, self.offsets = members, weights / weights.sum(0), offsets

    def read_ahead(self, batch: Batch) -> Batch:
        """The batch with the weights [B, K], and of each teacher its sequences, and where each of B is among them."""
        source = np.searchsorted(self.offsets, batch.row_ids, "right") - 1
        weights = self.weights[:, source]
        data = {"weights": torch.from_numpy(weights.T.astype(np.float32))}
        for number, member in enumerate(self.members):
            read_here = weights[number] > 0
            read_here[0] |= not read_here.any()
            data[f"{number}.rows"] = torch.from_numpy(np.flatnonzero(read_here))
            data[f"{number}.places"] = torch.from_numpy(np.where(read_here, read_here.cumsum() - 1, 0))
            if (lengths := batch.inputs.get(LENGTHS)) is not None:
                row = (lengths.cumsum(0) - lengths).div(batch.ids.shape[1], rounding_mode="floor")
                data[f"{number}.{LENGTHS}"] = lengths[torch.from_numpy(read_here)[row]]
            named = {f"sources.{name}": value for name, value in data.items()}
            read = member.read_ahead(self._of_member(batch.with_teacher_data(**named), number))
            batch = batch.with_teacher_data(**read.teacher_data)
        return batch

    def outputs(self, window: list[Batch], spec_of: Wanted) -> Iterator[TeacherOutput]:
        streams = [self._outputs_of(number, window, spec_of) for number in range(len(self.members))]
        for batch, outputs in zip(window, zip(*streams, strict=True), strict=True):
            found = [output.distribution for output in outputs if output.distribution is not None]
            if not found:
                yield TeacherOutput(None, NO_OUTPUTS)
                continue
            weights = _data(batch, "weights").index_select(0, _positions(batch, spec_of(batch)) // batch.ids.shape[1])
            yield TeacherOutput(Mixture(tuple(found), weights), NO_OUTPUTS)

    def _outputs_of(self, number: int, window: list[Batch], spec_of: Wanted) -> Iterator[TeacherOutput]:
        """What a teacher gives at all requested positions: anything at those of sequences that it does not teach."""
        read = [self._of_member(batch, number) for batch in window]
        of_all = {id(one): batch for one, batch in zip(read, window, strict=True)}

        def wanted(one: Batch) -> OutputSpec:
            batch = of_all[id(one)]
            spec, length = spec_of(batch), batch.ids.shape[1]
            row, column = (positions := _positions(batch, spec)) // length, positions % length
            places = _data(batch, f"{number}.places").index_select(0, row)
            return OutputSpec(spec.head, places * length + column)

        return self.members[number].outputs(read, wanted)

    def _of_member(self, batch: Batch, number: int) -> Batch:
        """The sequences of a batch that a teacher reads."""
        rows = _data(batch, f"{number}.rows")
        inputs = {name: value.index_select(0, rows) for name, value in batch.inputs.items() if name != LENGTHS}
        if LENGTHS in batch.inputs:
            inputs[LENGTHS] = _data(batch, f"{number}.{LENGTHS}")
        documents = None if batch.documents is None else batch.documents.index_select(0, rows)
        return replace(batch, inputs=inputs, documents=documents)


def _data(batch: Batch, name: str) -> Tensor:
    return batch.teacher_data[f"sources.{name}"]


def _positions(batch: Batch, spec: OutputSpec) -> Tensor:
    """The flat positions [N] that a request is about."""
    if spec.positions is None:
        return torch.arange(batch.ids.numel(), device=batch.ids.device)
    return spec.positions
