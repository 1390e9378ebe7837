"""A teacher that runs while the student trains."""

from collections.abc import Iterator
from itertools import groupby

import torch

from distill.data.batch import Batch
from distill.models.language_model import NO_OUTPUTS, LanguageModel, OutputSpec
from distill.teacher.output import TeacherOutput, Wanted


class LiveTeacher:
    """A frozen model; one forward of it may take several of the student's micro-batches, as it keeps nothing."""

    def __init__(self, model: LanguageModel, micro_batches: int = 1) -> None:
        self.model, self.micro_batches = model, micro_batches

    def read_ahead(self, batch: Batch) -> Batch:
        return batch

    def outputs(self, window: list[Batch], spec_of: Wanted) -> Iterator[TeacherOutput]:
        for part in self._parts(window):
            specs = [spec_of(batch) for batch in part]
            if specs[0].is_empty:
                yield from (TeacherOutput(None, NO_OUTPUTS) for _ in part)
            else:
                yield from self._forward(part, specs)

    def _parts(self, window: list[Batch]) -> Iterator[list[Batch]]:
        """Batches in a row that go into one forward: those of labelled texts may differ in length."""
        for _, of_length in groupby(window, lambda batch: batch.ids.shape[1]):
            alike = list(of_length)
            for start in range(0, len(alike), self.micro_batches):
                yield alike[start : start + self.micro_batches]

    def _forward(self, batches: list[Batch], specs: list[OutputSpec]) -> Iterator[TeacherOutput]:
        """One forward of all batches, and its outcome, cut up again by batch."""
        with torch.no_grad():
            outputs = self.model(*_joined(batches), _joined_spec(batches, specs))
        counts = [
            batch.ids.numel() if spec.positions is None else len(spec.positions)
            for batch, spec in zip(batches, specs, strict=True)
        ]
        rows = None if outputs.head_rows is None else outputs.head_rows.split(counts)
        last_rows = None if outputs.last_rows is None else outputs.last_rows.split(counts)
        start = 0
        for number, batch in enumerate(batches):
            here = outputs.of_sequences(slice(start, start + len(batch.ids)))
            here = here._replace(last_rows=None if last_rows is None else last_rows[number])
            yield TeacherOutput(None if rows is None else self.model.head(rows[number]), here)
            start += len(batch.ids)


def _joined(batches: list[Batch]) -> tuple[dict[str, torch.Tensor], torch.Tensor | None]:
    """Inputs and documents of all batches, one after the other."""
    if len(batches) == 1:
        return batches[0].inputs, batches[0].documents
    inputs = {name: torch.cat([batch.inputs[name] for batch in batches]) for name in batches[0].inputs}
    if all(batch.documents is None for batch in batches):
        return inputs, None
    return inputs, torch.cat(
        [torch.zeros_like(batch.ids) if batch.documents is None else batch.documents for batch in batches]
    )


def _joined_spec(batches: list[Batch], specs: list[OutputSpec]) -> OutputSpec:
    """One request for all batches: the positions of each follow those of the batches before it."""
    if len(batches) == 1 or not (specs[0].head or specs[0].last_rows) or all(spec.positions is None for spec in specs):
        return specs[0]
    positions, start = [], 0
    for batch, spec in zip(batches, specs, strict=True):
        count = batch.ids.numel()
        of_batch = torch.arange(count, device=batch.ids.device) if spec.positions is None else spec.positions
        positions.append(of_batch + start)
        start += count
    return specs[0]._replace(positions=torch.cat(positions))
