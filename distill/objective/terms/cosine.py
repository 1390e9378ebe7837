"""Hidden directions: the angle between the last hidden states of student and teacher."""

from typing import Any

from torch import Tensor

from distill.data.batch import Batch
from distill.models.language_model import LAST, Outputs, OutputSpec
from distill.models.shapes import hidden_widths
from distill.objective import losses
from distill.objective.terms import Term
from distill.teacher.signal import Signal


class Cosine(Term):
    """1 - cos of the last hidden states at every non-padding position; see `losses.cosine`."""

    title = "Hidden states (cosine)"
    student_reads = teacher_reads = OutputSpec(layers=(LAST,))

    def build(self, student: Any, teacher: Any | None) -> None:
        widths = [hidden_widths(model, (LAST,))[0] for model in (teacher, student) if model is not None]
        if len(widths) == 2 and widths[0] != widths[1]:
            raise ValueError(f"weight: teacher and student have hidden sizes {widths[0]} and {widths[1]}; set it to 0")

    def count(self, batch: Batch) -> int:
        return batch.num_valid

    def loss_sum(self, student: Outputs, teacher: Signal, batch: Batch) -> Tensor:
        return losses.cosine(*(valid_rows(each.hidden[LAST], batch) for each in (student, teacher.outputs))).sum()


def valid_rows(hidden: Tensor, batch: Batch) -> Tensor:
    """[B, S, H] -> [num_valid, H], without padding."""
    rows = hidden.flatten(0, 1)
    return rows if batch.valid_positions is None else rows.index_select(0, batch.valid_positions)
