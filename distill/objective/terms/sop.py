"""Sentence order prediction: the cross-entropy of whether two segments are swapped."""

from torch import Tensor
from torch.nn.functional import cross_entropy

from distill.data.batch import Batch
from distill.models.language_model import Outputs, OutputSpec
from distill.objective.terms import Term
from distill.teacher.output import TeacherOutput


class Sop(Term):
    """Cross-entropy of the order of each sequence's segments, in nats (Lan et al., "ALBERT", 2020, section 3.1)."""

    title = "Order of segments (SOP)"
    task = "sop"
    needs_teacher = False
    student_reads = OutputSpec(extra=("sop",))

    def count(self, batch: Batch) -> int:
        return len(batch.labels["sop"].targets)

    def loss_sum(self, student: Outputs, teacher: TeacherOutput, batch: Batch) -> Tensor:
        sequences, targets = batch.labels["sop"]
        return cross_entropy(student.extra["sop"][sequences], targets, reduction="sum")
