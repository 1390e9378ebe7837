"""Classes and values of texts: the cross-entropy of the class, or the squared error of the value."""

from torch import Tensor
from torch.nn.functional import cross_entropy, mse_loss

from distill.data.batch import Batch
from distill.models.language_model import Outputs, OutputSpec
from distill.objective.terms import Term
from distill.teacher.output import TeacherOutput


class Classes(Term):
    """Cross-entropy in nats where targets are the numbers of classes, (output - target)^2 where they are values.

    Sequences without a label do not count. The task is also the name of the head.
    """

    title = "Class"
    task = "class"
    needs_teacher = False
    student_reads = OutputSpec(extra=("class",))

    def count(self, batch: Batch) -> int:
        return len(batch.labels[self.task].targets)

    def loss_sum(self, student: Outputs, teacher: TeacherOutput, batch: Batch) -> Tensor:
        sequences, targets = batch.labels[self.task]
        outputs = student.extra[self.task][sequences]
        if targets.is_floating_point():
            return mse_loss(outputs[:, 0], targets.to(outputs.dtype), reduction="sum")
        return cross_entropy(outputs, targets, reduction="sum")
