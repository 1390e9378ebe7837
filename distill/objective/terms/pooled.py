"""Pooled vectors: the distance of one vector per sequence, as in the distillation of embedding models."""

from enum import Enum
from typing import Any

from torch import Tensor

from distill.data.batch import Batch
from distill.models.language_model import Outputs, OutputSpec
from distill.models.shapes import pooled_width
from distill.objective import losses
from distill.objective.terms import Term
from distill.objective.terms._pairs import projected, projections
from distill.teacher.output import TeacherOutput


class Pooling(Enum):
    """What stands for a sequence."""

    mean = "mean"  # the mean of its last hidden states, without padding
    cls = "cls"  # the last hidden state of its first position


class Distance(Enum):
    """Between two vectors."""

    l2 = "l2"  # squared Euclidean
    cosine = "cosine"  # 1 - cos


class Pooled(Term):
    """|s W - t|^2, or 1 - cos(s W, t), of the pooled vectors s of the student and t of the teacher, for every sequence.

    The squared distance is the loss of LEAF (Vujanic and Rueckstiess 2025, arXiv:2509.12539). W is a projection without
    bias, trained beside the student where widths differ. It reads nothing but one vector per sequence.
    """

    title = "Pooled vectors"
    across_tokenizers = True

    def __init__(self, pooling: Pooling = Pooling.mean, distance: Distance = Distance.l2) -> None:
        """`pooling`: what stands for a sequence: the mean of its last hidden states, or that of its first position.

        `distance`: between two vectors: the squared Euclidean one, or 1 - cos.
        """
        self.kind, self.distance = pooling.value, distance
        self.reads_first_position = pooling is Pooling.cls
        self.student_reads = self.teacher_reads = OutputSpec(pooled=(self.kind,))

    def build(self, student: Any, teacher: Any | None) -> None:
        if teacher is not None:
            self.module = projections([pooled_width(student, self.kind)], [pooled_width(teacher, self.kind)])

    def count(self, batch: Batch) -> int:
        return len(batch.ids)

    def loss_sum(self, student: Outputs, teacher: TeacherOutput, batch: Batch) -> Tensor:
        vectors = projected(self.module, 0, student.pooled[self.kind])
        teacher_vectors = teacher.outputs.pooled[self.kind]
        if self.distance is Distance.cosine:
            return losses.cosine(vectors, teacher_vectors).sum()
        return (vectors - teacher_vectors).square().sum()
