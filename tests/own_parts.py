"""Parts as a user would write them, for tests that name them by `_target_`."""

from typing import Any

from torch import Tensor, nn

from distill.data.batch import Batch
from distill.models.language_model import Outputs
from distill.objective.terms import Term
from distill.objective.terms.cosine import valid_rows
from distill.teacher.signal import Signal


class ProjectedHidden(Term):
    """Mean squared error of a student's layer, projected to the teacher's width, against a layer of the teacher."""

    title = "Projected hidden state"

    def __init__(self, student_layer: int, teacher_layer: int) -> None:
        self.student_layers, self.teacher_layers = (student_layer,), (teacher_layer,)

    def build(self, student: Any, teacher: Any | None) -> None:
        assert teacher is not None
        self.module = nn.Linear(student.config.hidden_size, teacher.config.hidden_size)

    def count(self, batch: Batch) -> int:
        return batch.num_valid

    def loss_sum(self, student: Outputs, teacher: Signal, batch: Batch) -> Tensor:
        own = valid_rows(student.hidden[self.student_layers[0]], batch)
        other = valid_rows(teacher.outputs.hidden[self.teacher_layers[0]], batch)
        assert self.module is not None
        return (self.module(own) - other).square().mean(-1).sum()
