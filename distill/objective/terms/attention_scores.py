"""Attention: the squared distance of the scores of chosen blocks, as in TinyBERT."""

from typing import Any

import torch
from torch import Tensor

from distill.data.batch import Batch
from distill.models.language_model import Outputs, OutputSpec, attention_shapes
from distill.models.precision import at_least_fp32
from distill.models.recorded_attention import QKV, visible_to_both
from distill.objective.terms._pairs import PairsTerm
from distill.teacher.output import TeacherOutput


class AttentionScores(PairsTerm):
    """Sum over pairs of blocks of the MSE between their attention scores, scaling * query key^T.

    Jiao et al., "TinyBERT: Distilling BERT for Natural Language Understanding" (2020), equation 7: head by head, before
    the softmax. Every non-padding position counts once, with the mean over the heads and over the keys that it sees.
    Blocks are numbered from 1; without `pairs` all of the student's count, evenly spread.
    """

    title = "Attention scores (MSE)"
    lowest = 1
    spread = (1, 0)

    def build_pairs(self, student: Any, layers: tuple[int, ...], teacher: Any, teacher_layers: tuple[int, ...]) -> None:
        shapes = zip(attention_shapes(student, layers), attention_shapes(teacher, teacher_layers), strict=True)
        for own, other in shapes:
            if own.heads != other.heads:
                raise ValueError(
                    f"weight: the teacher has {other.heads} attention heads and the student {own.heads}; "
                    "give the student as many, or use objective.relations, which splits both into as many heads"
                )
        self.student_reads, self.teacher_reads = OutputSpec(qkv=layers), OutputSpec(qkv=teacher_layers)

    def count(self, batch: Batch) -> int:
        return batch.num_valid

    def loss_sum(self, student: Outputs, teacher: TeacherOutput, batch: Batch) -> Tensor:
        qkv = teacher.outputs.qkv
        errors = [mean_squared_error(student.qkv[block], qkv[other]) for block, other in self.pairs or ()]
        return torch.stack([batch.valid(error).sum() for error in errors]).sum()


def mean_squared_error(student: QKV, teacher: QKV) -> Tensor:
    """Between the scores of two blocks with equally many heads, over heads and keys that both models see -> [B, S]."""
    squared = (_scores(student) - _scores(teacher)).square().mean(1)
    visible = visible_to_both(student.mask, teacher.mask)
    if visible is None:
        return squared.mean(-1)
    seen = visible[:, 0].to(squared.dtype)
    return (squared * seen).sum(-1) / seen.sum(-1).clamp(min=1)


def _scores(qkv: QKV) -> Tensor:
    """[B, heads, S, S], before the softmax and before any capping."""
    query, key, *_ = qkv.repeated()
    return qkv.scaling * at_least_fp32(query) @ at_least_fp32(key).mT
