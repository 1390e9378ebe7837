"""A teacher that reads more than its student: a context in front of each document.

Context distillation (Askell et al. 2021, "A General Language Assistant as a Laboratory for Alignment"; Snell et al.
2022, "Learning by Distilling Context"): the student learns to predict without the context what the teacher, mostly the
same model, predicts with it.

Shapes: B sequences of S positions as the student reads them, of L as the teacher does; C tokens of context.
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch

from distill.data.batch import PADDING, Batch
from distill.data.collate.clm import document_lengths, restarting
from distill.models.language_model import OutputSpec
from distill.teacher.live import LiveTeacher
from distill.teacher.output import Teacher, TeacherOutput, Wanted

READ = ("input_ids", "position_ids", "document_lengths")  # of the teacher's own inputs


def prompted(teacher: LiveTeacher, context: tuple[int, ...], first: int | None, name: str = "") -> Teacher:
    """The teacher with this context, as `PromptedTeacher` has it; as it is without one."""
    return PromptedTeacher(teacher, context, first, name) if context else teacher


class PromptedTeacher:
    """A causal teacher that reads a context in front of each document, and gives nothing for its tokens.

    The context stands behind the beginning-of-text token, where a document begins with one. What a sequence has of a
    document that began in another one is read behind a context too.
    """

    def __init__(self, teacher: LiveTeacher, context: tuple[int, ...], first: int | None, name: str) -> None:
        """
        Args:
            context: its tokens [C].
            first: the beginning-of-text token; None: texts have none.
            name: of this teacher among several.
        """
        self.teacher, self.context, self.first, self.name = teacher, np.array(context), first, name

    def read_ahead(self, batch: Batch) -> Batch:
        """The batch with what the teacher reads, and where in it each position of the student stands, [B * S]."""
        batch_here = batch.to(torch.device("cpu"))  # in scoring it lies where the models do
        ids, (height, length), count = batch_here.ids.numpy().reshape(-1), batch.ids.shape, len(self.context)
        documents, lengths = batch_here.documents, batch_here.inputs["document_lengths"].numpy()
        valid = np.ones(ids.size, bool) if documents is None else documents.numpy().reshape(-1) != PADDING
        starts = lengths.cumsum() - lengths
        starts, lengths = starts[valid[starts]], lengths[valid[starts]]
        # The position of the student that each context stands in front of.
        follows = starts + ((ids[starts] == self.first) & (lengths > 1))
        row, column = np.divmod(np.arange(ids.size), length)
        in_rows_before = np.searchsorted(follows, np.arange(height + 1) * length)
        width = length + count * int(np.diff(in_rows_before).max())
        contexts = np.searchsorted(follows, np.arange(ids.size), "right") - in_rows_before[row]
        places = row * width + column + count * contexts
        added = (places[follows] - count)[:, None] + np.arange(count)

        read, is_text = np.zeros((height, width), np.int64), np.zeros((height, width), bool)
        read.flat[places], is_text.flat[places] = ids, valid
        read.flat[added], is_text.flat[added] = self.context, True
        begins = np.zeros((height, width), bool)
        begins.flat[places[starts] - count * (starts == follows)] = True
        begins[:, 1:] |= is_text[:, :-1] & ~is_text[:, 1:]  # padding, a document of its own
        positions = restarting(begins.cumsum(1))
        data = {"input_ids": read, "position_ids": positions, "document_lengths": document_lengths(positions)}
        data |= {"places": places, "documents": np.where(is_text, 0, PADDING)}
        return batch.with_teacher_data(**{self._key(name): torch.from_numpy(value) for name, value in data.items()})

    def outputs(self, window: list[Batch], spec_of: Wanted) -> Iterator[TeacherOutput]:
        read = [self._as_read(batch) for batch in window]
        of_student = {id(one): batch for one, batch in zip(read, window, strict=True)}

        def wanted(batch: Batch) -> OutputSpec:
            spec, places = spec_of(of_student[id(batch)]), self._data(batch, "places")
            return spec._replace(positions=places if spec.positions is None else places[spec.positions])

        for batch, (distribution, outputs) in zip(window, self.teacher.outputs(read, wanted), strict=True):
            places, shape = self._data(batch, "places"), batch.ids.shape
            hidden = {
                layer: states.flatten(0, 1).index_select(0, places).view(*shape, -1)
                for layer, states in outputs.hidden.items()
            }
            yield TeacherOutput(distribution, outputs._replace(hidden=hidden))

    def _as_read(self, batch: Batch) -> Batch:
        """The batch as the teacher reads it."""
        own = {name: self._data(batch, name) for name in READ if name in batch.inputs}
        return replace(batch, inputs=batch.inputs | own, documents=self._data(batch, "documents"))

    def _key(self, name: str) -> str:
        return f"context.{self.name}.{name}"

    def _data(self, batch: Batch, name: str) -> torch.Tensor:
        return batch.teacher_data[self._key(name)]
