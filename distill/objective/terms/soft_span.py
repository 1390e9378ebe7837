"""Soft targets for answers: the teacher's probabilities of the first and of the last token."""

import torch
from torch import Tensor

from distill.data.batch import Batch
from distill.models.language_model import Outputs, OutputSpec
from distill.objective import losses
from distill.objective.terms.soft_classes import SoftClasses
from distill.objective.terms.span import text_logits
from distill.teacher.output import TeacherOutput


class SoftSpan(SoftClasses):
    """The mean over first and last token of T^2 KL(teacher || student), over the positions of each sequence.

    As DistilBERT was fine-tuned with a second teacher (Sanh et al. 2019, section 4); see `losses.soft`. Sequences whose
    answer is not known count too.
    """

    title = "Soft answer"
    student_reads = teacher_reads = OutputSpec(extra=("span",))

    def loss_sum(self, student: Outputs, teacher: TeacherOutput, batch: Batch) -> Tensor:
        logits = text_logits(student.extra["span"], batch)
        teacher_logits = text_logits(teacher.outputs.extra["span"], batch)
        parts = [losses.soft(logits[..., end], teacher_logits[..., end], self.temperature).sum() for end in (0, 1)]
        return torch.stack(parts).mean()
