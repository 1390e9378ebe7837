"""All losses over the vocabulary at once: on full logits for reading, or in chunks that keep none.

Shapes: N rows, V vocabulary, T terms.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from distill.models.language_model import Head
from distill.objective.blocks import AutogradBlock, Block, JoinedBlock, SoftMlmBlock, on_its_rows
from distill.objective.fused import chunked_loss
from distill.objective.terms import ALL, VocabularyTerm
from distill.objective.terms.mlm import Mlm
from distill.objective.terms.soft import Soft
from distill.teacher.signal import TopK


def vocabulary_loss(
    terms: Sequence[VocabularyTerm],
    student: Head,
    teacher: Head | TopK | None,
    targets: Tensor,
    scales: Tensor,
    vocab: int,
    compiled: bool,
) -> tuple[Tensor, Tensor]:
    """Sum over the terms of scale * sum over their rows, and the unscaled sums [T], detached.

    Soft targets and masked words have a kernel of their own, written by hand; any other terms are computed by their
    formulas, block by block.

    Args:
        teacher: logits or entries of the same rows; None where no term needs a teacher.
        targets: [N] int64, -100 in a row without one.
        scales: [T], in the format that elementwise work is done in.
    """
    soft, mlm, others = _split(terms)
    if soft is None and mlm is None:
        return chunked_loss(student, teacher, targets, AutogradBlock(others), scales, vocab=vocab)
    pair = SoftMlmBlock(soft.temperature, soft.cutoff, compiled) if soft else SoftMlmBlock(1.0, 0.0, compiled)
    # The pair's two terms first, then the others; of the pair, a term that is not there has no scale.
    none = scales.new_zeros(())
    numbers = [None if term is None else terms.index(term) for term in (soft, mlm, *others)]
    ordered = torch.stack([none if number is None else scales[number] for number in numbers])
    if others:
        block: Block = JoinedBlock(pair, soft is not None, mlm is not None, AutogradBlock(others))
        loss, sums = chunked_loss(student, teacher, targets, block, ordered, vocab=vocab)
    else:
        known, wanted = teacher if soft else None, targets if mlm else None
        loss, sums = chunked_loss(student, known, wanted, pair, ordered, vocab=vocab)
    return loss, torch.stack([sums[numbers.index(number)] for number in range(len(terms))])


def has_pair(terms: Sequence[VocabularyTerm]) -> bool:
    """Whether a term among these has the hand-written kernel, which is what torch.compile takes."""
    return any(term is not None for term in _split(terms)[:2])


def _split(terms: Sequence[VocabularyTerm]) -> tuple[Soft | None, Mlm | None, list[VocabularyTerm]]:
    """What the hand-written kernel takes, a soft term and one of masked words, and all others.

    A class that inherits from these two may compute something else. The kernel has soft targets in every row that is
    visited, so a soft term of masked positions is among the others where further rows are visited for their sake.
    """
    all_rows = any(term.rows == ALL for term in terms)
    soft = next((term for term in terms if type(term) is Soft and (term.rows == ALL) == all_rows), None)
    mlm = next((term for term in terms if type(term) is Mlm), None)
    return soft, mlm, [term for term in terms if term is not soft and term is not mlm]


def reference_loss(
    terms: Sequence[VocabularyTerm],
    student: Head,
    teacher: Head | TopK | None,
    targets: Tensor,
    scales: Tensor,
    vocab: int,
) -> tuple[Tensor, Tensor]:
    """The same as `vocabulary_loss`, as one would write it: all logits of both models, then each term's formula."""
    logits = _logits(student, vocab)
    known = _logits(teacher, vocab) if isinstance(teacher, Head) else teacher
    sums = torch.stack([on_its_rows(term, term.losses(logits, known, targets), targets).sum() for term in terms])
    return (scales * sums).sum(), sums.detach()


def _logits(head: Head, vocab: int) -> Tensor:
    """[N, vocab]"""
    bias = None if head.bias is None else head.bias[:vocab].to(head.dtype)
    return torch.nn.functional.linear(head.rows.to(head.dtype), head.weight[:vocab].to(head.dtype), bias)
