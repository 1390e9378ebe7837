"""Soft targets for the order of segments: the teacher's probabilities of either order."""

from torch import Tensor

from distill.data.batch import Batch
from distill.models.language_model import Outputs, OutputSpec
from distill.objective import losses
from distill.objective.terms._distributions import SoftHead
from distill.teacher.output import TeacherOutput


class SoftSop(SoftHead):
    """T^2 KL(teacher || student) of the order of each sequence's segments, both at temperature T; see `losses.soft`."""

    title = "Soft order of segments"
    task = "sop"
    student_reads = teacher_reads = OutputSpec(extra=("sop",))

    def count(self, batch: Batch) -> int:
        return len(batch.labels["sop"].targets)

    def loss_sum(self, student: Outputs, teacher: TeacherOutput, batch: Batch) -> Tensor:
        return losses.soft(student.extra["sop"], teacher.outputs.extra["sop"], self.temperature).sum()
