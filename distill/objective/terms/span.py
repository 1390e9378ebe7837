"""Answers as spans: the cross-entropy of their first and of their last token."""

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from distill.data.batch import Batch
from distill.models.language_model import Outputs, OutputSpec
from distill.objective.terms import Term
from distill.teacher.output import TeacherOutput

NEVER = -1e4  # the logit of positions that hold no text


class Span(Term):
    """The mean of both cross-entropies of each sequence, in nats (Devlin et al., "BERT", 2019, section 4.2).

    Sequences whose answer is not known do not count. Padding is left out of the softmax, so that the loss does not
    depend on how long a batch is.
    """

    title = "Answer (first and last token)"
    task = "span_start"
    needs_teacher = False
    student_reads = OutputSpec(extra=("span",))

    def count(self, batch: Batch) -> int:
        return len(batch.labels["span_start"].targets)

    def loss_sum(self, student: Outputs, teacher: TeacherOutput, batch: Batch) -> Tensor:
        sequences, starts = batch.labels["span_start"]
        logits = text_logits(student.extra["span"], batch)[sequences]
        ends = (starts, batch.labels["span_end"].targets)
        parts = [cross_entropy(logits[..., end], targets, reduction="sum") for end, targets in enumerate(ends)]
        return torch.stack(parts).mean()


def text_logits(logits: Tensor, batch: Batch) -> Tensor:
    """logits [B, S, 2] with NEVER at padding."""
    return logits if batch.documents is None else logits.masked_fill((batch.documents < 0)[..., None], NEVER)
