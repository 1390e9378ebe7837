"""All losses over the vocabulary at once: on full logits for reading, or in one visit that keeps none.

Shapes: N rows, V vocabulary, T terms.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from distill.models.language_model import Head
from distill.objective.blocks import AutogradBlock, PairBlock, on_its_rows
from distill.objective.fused import one_visit
from distill.objective.terms import VocabularyTerm
from distill.objective.terms.mlm import Mlm
from distill.objective.terms.soft import Soft
from distill.teacher.signal import TopK


def visit(
    terms: Sequence[VocabularyTerm],
    student: Head,
    teacher: Head | TopK | None,
    targets: Tensor,
    scales: Tensor,
    vocab: int,
    compiled: bool,
) -> tuple[Tensor, Tensor]:
    """Sum over the terms of scale * sum over their rows, and the unscaled sums [T], detached.

    Soft targets and masked words together have a kernel of their own, written by hand; any other terms are computed by
    their formulas, block by block.

    Args:
        teacher: logits or entries of the same rows; None where no term needs a teacher.
        targets: [N] int64, -100 in a row without one.
        scales: [T], in the format that elementwise work is done in.
    """
    pair = _as_pair(terms)
    if pair is None:
        return one_visit(student, teacher, targets, AutogradBlock(terms), scales, vocab=vocab)
    soft, numbers = pair
    block = PairBlock(soft.temperature, soft.cutoff, compiled) if soft else PairBlock(1.0, 0.0, compiled)
    # The kernel computes both, in its own order; a term that is not there has no scale and nothing to read.
    none = scales.new_zeros(())
    both = torch.stack([scales[numbers.index(each)] if each in numbers else none for each in (0, 1)])
    known, wanted = teacher if 0 in numbers else None, targets if 1 in numbers else None
    loss, sums = one_visit(student, known, wanted, block, both, vocab=vocab)
    return loss, torch.stack([sums[number] for number in numbers])


def _as_pair(terms: Sequence[VocabularyTerm]) -> tuple[Soft | None, list[int]] | None:
    """The soft term, and each term's number in `PairBlock`; None where there are other terms."""
    kinds = [type(term) for term in terms]
    if len(set(kinds)) != len(kinds) or not set(kinds) <= {Soft, Mlm}:
        return None
    soft = next((term for term in terms if isinstance(term, Soft)), None)
    return soft, [0 if kind is Soft else 1 for kind in kinds]


def plain(
    terms: Sequence[VocabularyTerm],
    student: Head,
    teacher: Head | TopK | None,
    targets: Tensor,
    scales: Tensor,
    vocab: int,
) -> tuple[Tensor, Tensor]:
    """The same as `visit`, as one would write it: all logits of both models, then each term's formula."""
    logits = _logits(student, vocab)
    known = _logits(teacher, vocab) if isinstance(teacher, Head) else teacher
    sums = torch.stack([on_its_rows(term, term.losses(logits, known, targets), targets).sum() for term in terms])
    return (scales * sums).sum(), sums.detach()


def _logits(head: Head, vocab: int) -> Tensor:
    """[N, vocab]"""
    bias = None if head.bias is None else head.bias[:vocab].to(head.dtype)
    return torch.nn.functional.linear(head.rows.to(head.dtype), head.weight[:vocab].to(head.dtype), bias)
