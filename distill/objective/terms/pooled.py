"""Pooled vectors: the distance of one vector per sequence, as in the distillation of embedding models."""

import logging
from enum import Enum
from typing import Any

from torch import Tensor

from distill.data.batch import Batch
from distill.models.language_model import Outputs, OutputSpec, pooled_width
from distill.models.pooling import MEAN, saved_pooling
from distill.objective import losses
from distill.objective.terms import Term
from distill.objective.terms._pairs import projected, projections
from distill.teacher.output import TeacherOutput

logger = logging.getLogger(__name__)


class Pooling(Enum):
    """What stands for a sequence."""

    auto = "auto"  # what the folder of the model says (1_Pooling of sentence-transformers), else the mean
    mean = "mean"  # the mean of its last hidden states, without padding
    cls = "cls"  # the last hidden state of its first position
    last = "last"  # that of its last position
    max = "max"  # of each component the largest value
    mean_sqrt_len = "mean_sqrt_len"  # the sum of all, divided by the root of their number
    weighted_mean = "weighted_mean"  # the mean with the weights 1, 2, 3, ...


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

    def __init__(self, pooling: Pooling = Pooling.auto, distance: Distance = Distance.l2) -> None:
        """`pooling`: what stands for a sequence; auto is what 1_Pooling beside the model says, else the mean.

        A student without such a file is pooled as its teacher. `distance`: between two vectors: the squared Euclidean
        one, or 1 - cos.
        """
        self.pooling, self.distance = pooling, distance
        self.normalizes = False  # whether the teacher's folder gives its vectors the length 1 behind what is compared
        self.reads_first_position = pooling is Pooling.cls
        self._read(*(2 * [MEAN if pooling is Pooling.auto else pooling.value]))

    def _read(self, student: str, teacher: str) -> None:
        self.student_kind, self.teacher_kind = student, teacher
        self.student_reads, self.teacher_reads = OutputSpec(pooled=(student,)), OutputSpec(pooled=(teacher,))

    def build(self, student: Any, teacher: Any | None) -> None:
        saved = None if teacher is None else saved_pooling(teacher)
        self.normalizes = saved is not None and saved.normalizes
        if self.pooling is not Pooling.auto:
            if saved is not None and (saved.unsupported or saved.kind != self.pooling.value):
                says = saved.unsupported or f"1_Pooling={saved.kind}"
                logger.warning(
                    f"objective.pooled.pooling={self.pooling.value} takes other vectors of the teacher than its folder "
                    f"{saved.place} makes, which has {says} in its modules.json"
                )
        elif saved is not None:
            if saved.kind is None or saved.unsupported:
                raise ValueError(
                    f"pooling=auto: the folder {saved.place} of the teacher makes its vectors with {saved.unsupported} "
                    "(modules.json), which is not supported here; choose another teacher, or "
                    f"objective.pooled.pooling={saved.kind or MEAN} for the vectors before that"
                )
            of_student = saved_pooling(student)
            self._read((of_student and of_student.kind) or saved.kind, saved.kind)
            before = ", before they are normalized" if saved.normalizes else ""
            logger.info(f"pooled vectors are compared as 1_Pooling of {saved.place} says: {saved.kind}{before}")
        if teacher is not None:
            widths = [pooled_width(student, self.student_kind)], [pooled_width(teacher, self.teacher_kind)]
            self.module = projections(*widths)

    def count(self, batch: Batch) -> int:
        return len(batch.ids)

    def loss_sum(self, student: Outputs, teacher: TeacherOutput, batch: Batch) -> Tensor:
        vectors = projected(self.module, 0, student.pooled[self.student_kind])
        teacher_vectors = teacher.outputs.pooled[self.teacher_kind]
        if self.distance is Distance.cosine:
            return losses.cosine(vectors, teacher_vectors).sum()
        return (vectors - teacher_vectors).square().sum()
