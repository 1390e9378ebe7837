"""Relations: which positions have similar queries, keys and values, as in MiniLMv2."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from distill.data.batch import Batch
from distill.models.blocks import depth_of
from distill.models.language_model import LAST, Outputs, OutputSpec, attention_shapes
from distill.models.precision import at_least_fp32
from distill.models.recorded_attention import visible_to_both
from distill.objective.terms import Term
from distill.objective.terms._pairs import layer_number
from distill.teacher.output import TeacherOutput


class Relations(Term):
    """KL of the student's relations from the teacher's, for the queries, the keys and the values of one block each.

    Wang et al., "MiniLMv2: Multi-Head Self-Attention Relation Distillation for Compressing Pretrained Transformers"
    (2021), section 3.1; see `divergence`. Every non-padding position counts once, with the mean over the
    relation heads. Widths and numbers of attention heads may differ, without a projection.
    """

    title = "Relations of queries, keys, values"

    def __init__(
        self,
        student_layer: int = LAST,
        teacher_layer: int = LAST,
        relation_heads: int = 12,
        query: float = 1.0,
        key: float = 1.0,
        value: float = 1.0,
    ) -> None:
        """What is compared, and how much each of the three counts.

        `student_layer`: the block of the student, from 1, or -1 for the last. `teacher_layer`: the block of the
        teacher, from 1, or -1 for the last. `relation_heads`: parts into which queries, keys and values are split, a
        number that divides both widths. `query`: weight of the relations of queries. `key`: weight of the relations of
        keys. `value`: weight of the relations of values.
        """
        self.weights = {"query": query, "key": key, "value": value}
        for name, weight in self.weights.items():
            if not weight >= 0 or not math.isfinite(weight):
                raise ValueError(f"{name}={weight} is a weight: give 0 or more")
        if not any(self.weights.values()):
            raise ValueError("query=0, key=0 and value=0 leave nothing to compare: give one of them a weight")
        if relation_heads < 1:
            raise ValueError(f"relation_heads={relation_heads} is too small: give 1 or more")
        self.student_layer, self.teacher_layer, self.heads = student_layer, teacher_layer, relation_heads

    def build(self, student: Any, teacher: Any | None) -> None:
        if teacher is None:
            return
        self.student_layer = layer_number(
            f"student_layer={self.student_layer}", self.student_layer, depth_of(student), 1
        )
        self.teacher_layer = layer_number(
            f"teacher_layer={self.teacher_layer}", self.teacher_layer, depth_of(teacher), 1
        )
        (shape,) = attention_shapes(student, (self.student_layer,))
        (teacher_shape,) = attention_shapes(teacher, (self.teacher_layer,))
        widths, teacher_widths = shape.widths, teacher_shape.widths
        if any(width % self.heads for width in (*widths, *teacher_widths)):
            raise ValueError(
                f"relation_heads={self.heads} does not divide both the student's attention width {widths[0]} and the "
                f"teacher's {teacher_widths[0]}: choose a divisor of {math.gcd(*widths, *teacher_widths)}"
            )
        self.student_reads = OutputSpec(qkv=(self.student_layer,))
        self.teacher_reads = OutputSpec(qkv=(self.teacher_layer,))

    def count(self, batch: Batch) -> int:
        return batch.num_valid

    def loss_sum(self, student: Outputs, teacher: TeacherOutput, batch: Batch) -> Tensor:
        qkv = student.qkv[self.student_layer].repeated()
        teacher_qkv = teacher.outputs.qkv[self.teacher_layer].repeated()
        visible = visible_to_both(qkv.mask, teacher_qkv.mask)
        parts = [
            weight * divergence(getattr(qkv, name), getattr(teacher_qkv, name), self.heads, visible)
            for name, weight in self.weights.items()
            if weight > 0
        ]
        return batch.valid(torch.stack(parts).sum(0)).sum()


def divergence(student: Tensor, teacher: Tensor, heads: int, visible: Tensor | None) -> Tensor:
    """KL(softmax(T T^T / sqrt(d_T)) || softmax(S S^T / sqrt(d_S))), mean over the relation heads, in nats.

    [B, attention heads, S, d] each -> [B, S]. S and T are a model's vectors of all attention heads side by side, split
    anew into `heads` parts of d_S and d_T numbers. A query is compared with the keys that are `visible` to it alone.
    """
    log_q, log_p = (_log_relations(vectors, heads, visible) for vectors in (student, teacher))
    return F.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1).mean(1)


def _log_relations(vectors: Tensor, heads: int, visible: Tensor | None) -> Tensor:
    """[B, attention heads, S, d] -> log-probabilities [B, heads, S, S]."""
    split = at_least_fp32(vectors).transpose(1, 2).flatten(2).unflatten(-1, (heads, -1)).transpose(1, 2)
    scores = split @ split.mT / math.sqrt(split.shape[-1])
    if visible is not None:
        # Not -inf: a padding query may see no key, and its gradient would be nan though it does not count.
        scores = scores.masked_fill(~visible, torch.finfo(scores.dtype).min)
    return scores.log_softmax(-1)
