"""Soft targets for classes and values of texts: the teacher's probabilities, or its value."""

from torch import Tensor

from distill.data.batch import Batch
from distill.models.language_model import Outputs, OutputSpec
from distill.objective import losses
from distill.objective.terms import Term
from distill.objective.terms._distributions import checked
from distill.teacher.output import TeacherOutput


class SoftClasses(Term):
    """T^2 KL(teacher || student) over the classes of each sequence (Hinton et al. 2015); of values the squared error.

    The teacher may be all there is: sequences without a class count too.
    """

    title = "Soft class"
    student_reads = teacher_reads = OutputSpec(extra=("class",))

    def __init__(self, temperature: float) -> None:
        """`temperature`: the number by which the logits of both models are divided."""
        self.temperature = checked(temperature)

    def count(self, batch: Batch) -> int:
        return len(batch.ids)

    def loss_sum(self, student: Outputs, teacher: TeacherOutput, batch: Batch) -> Tensor:
        (head,) = self.student_reads.extra
        logits, teacher_logits = student.extra[head], teacher.outputs.extra[head]
        if logits.shape[-1] == 1:
            return (logits - teacher_logits).square().sum()
        return losses.soft(logits, teacher_logits, self.temperature).sum()
