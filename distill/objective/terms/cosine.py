"""Hidden directions: the angle between the last hidden states of student and teacher."""

from typing import Any

from torch import Tensor

from distill.data.batch import Batch
from distill.models.language_model import LAST, Outputs, OutputSpec, hidden_widths
from distill.objective import losses
from distill.objective.terms import ALL, Term
from distill.objective.terms._distributions import SoftPositions
from distill.teacher.output import TeacherOutput


class Cosine(Term):
    """1 - cos of the last hidden states at every non-padding position, or where a token is predicted (`positions`).

    See `losses.cosine`.
    """

    title = "Hidden states (cosine)"

    def __init__(self, positions: SoftPositions = SoftPositions.all) -> None:
        """`positions`: all, or masked (or targets), where alone a last layer that only this term reads is computed."""
        self.positions = positions.of_term
        self.student_reads = self.teacher_reads = (
            OutputSpec(layers=(LAST,)) if self.positions == ALL else OutputSpec(last_rows=True)
        )

    def build(self, student: Any, teacher: Any | None) -> None:
        widths = [hidden_widths(model, (LAST,))[0] for model in (teacher, student) if model is not None]
        if len(widths) == 2 and widths[0] != widths[1]:
            raise ValueError(f"weight: teacher and student have hidden sizes {widths[0]} and {widths[1]}; set it to 0")

    def count(self, batch: Batch) -> int:
        return batch.num_valid if self.positions == ALL else len(batch.targets.positions)

    def loss_sum(self, student: Outputs, teacher: TeacherOutput, batch: Batch) -> Tensor:
        if self.positions != ALL:
            rows = (outputs.last_rows for outputs in (student, teacher.outputs) if outputs.last_rows is not None)
            states = (batch.rows_at(each, batch.targets.positions) for each in rows)
        else:
            states = (batch.valid(outputs.hidden[LAST]) for outputs in (student, teacher.outputs))
        return losses.cosine(*states).sum()
