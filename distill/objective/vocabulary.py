"""All losses over the vocabulary at once: on full logits for reading, or in chunks that keep none.

Shapes: N rows, V vocabulary, T terms.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from distill.models.language_model import Head
from distill.objective.blocks import AutogradBlock, Block, JoinedBlock, SoftMlmBlock, on_its_rows
from distill.objective.fused import BUDGET, chunked_loss
from distill.objective.terms import ALL, VocabularyTerm
from distill.objective.terms.clm import Clm
from distill.objective.terms.mlm import Mlm
from distill.objective.terms.soft import Soft
from distill.runtime.errors import SettingError
from distill.teacher.signal import Mixture, Sparse, mixed_logits


def vocabulary_loss(
    terms: Sequence[VocabularyTerm],
    student: Head,
    teacher: Head | Sparse | Mixture | None,
    targets: Tensor,
    scales: Tensor,
    vocab: int,
    compiled: bool,
    budget: int = BUDGET,
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
        return chunked_loss(student, teacher, targets, AutogradBlock(others), scales, vocab=vocab, budget=budget)
    pair = SoftMlmBlock(soft.temperature, soft.cutoff, compiled) if soft else SoftMlmBlock(1.0, 0.0, compiled)
    # The pair's two terms first, then the others; of the pair, a term that is not there has no scale.
    none = scales.new_zeros(())
    numbers = [None if term is None else terms.index(term) for term in (soft, mlm, *others)]
    ordered = torch.stack([none if number is None else scales[number] for number in numbers])
    if others:
        block: Block = JoinedBlock(pair, soft is not None, mlm is not None, AutogradBlock(others))
        loss, sums = chunked_loss(student, teacher, targets, block, ordered, vocab=vocab, budget=budget)
    else:
        known, wanted = teacher if soft else None, targets if mlm else None
        loss, sums = chunked_loss(student, known, wanted, pair, ordered, vocab=vocab, budget=budget)
    return loss, torch.stack([sums[numbers.index(number)] for number in range(len(terms))])


def mixing_temperature(terms: Mapping[str, VocabularyTerm], scheduled: Mapping[str, Any] | None = None) -> float:
    """At which the probabilities of several teachers are averaged: that of the terms, by name, which read them.

    Args:
        scheduled: the temperatures that follow a schedule, which have to be the same over the whole run.

    Raises:
        SettingError: two of them have different ones.
    """
    found: dict[str, Any] = {
        name: (scheduled or {}).get(name) or getattr(term, "temperature", 1.0)
        for name, term in terms.items()
        if term.needs_teacher and term.reads_probabilities
    }
    if len(set(found.values())) > 1:
        values = ", ".join(f"objective.{name}.temperature={value}" for name, value in found.items())
        raise SettingError(
            f"teacher.kind=several averages probabilities at one temperature, but there are {values}: give them the "
            "same (a term of your own that takes no temperature reads them at 1)"
        )
    first: float = next(iter(found.values()), 1.0)
    return first


def has_pair(terms: Sequence[VocabularyTerm]) -> bool:
    """Whether a term among these has the hand-written kernel, which is what torch.compile takes."""
    return any(term is not None for term in _split(terms)[:2])


def _split(terms: Sequence[VocabularyTerm]) -> tuple[Soft | None, Mlm | Clm | None, list[VocabularyTerm]]:
    """What the hand-written kernel takes, a soft term and a cross-entropy of masked or next tokens, and all others.

    A class that inherits from these two may compute something else. The kernel has soft targets in every row that is
    visited, so a soft term of masked positions is among the others where further rows are visited for their sake.
    """
    all_rows = any(term.rows == ALL for term in terms)
    soft = next((term for term in terms if type(term) is Soft and (term.rows == ALL) == all_rows), None)
    mlm = next((term for term in terms if isinstance(term, Mlm | Clm) and type(term) in (Mlm, Clm)), None)
    return soft, mlm, [term for term in terms if term is not soft and term is not mlm]


def reference_loss(
    terms: Sequence[VocabularyTerm],
    student: Head,
    teacher: Head | Sparse | Mixture | None,
    targets: Tensor,
    scales: Tensor,
    vocab: int,
) -> tuple[Tensor, Tensor]:
    """The same as `vocabulary_loss`, as one would write it: all logits of both models, then each term's formula."""
    known: Tensor | Sparse | None
    if isinstance(teacher, Mixture) and not teacher.live:
        parts = [reference_loss(terms, student, member, targets, scales, vocab) for member in teacher.members]
        return _mean([loss for loss, _ in parts], teacher.weights), _mean([own for _, own in parts], teacher.weights)
    if isinstance(teacher, Mixture):
        heads = (_logits(head, vocab) for head in teacher.members if isinstance(head, Head))
        known = mixed_logits(heads, teacher.weights, teacher.temperature)
    else:
        known = _logits(teacher, vocab) if isinstance(teacher, Head) else teacher
    logits = _logits(student, vocab)
    sums = torch.stack([on_its_rows(term, term.losses(logits, known, targets), targets).sum() for term in terms])
    return (scales * sums).sum(), sums.detach()


def _mean(values: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    return torch.stack([weight * value for value, weight in zip(values, weights, strict=True)]).sum(0)


def _logits(head: Head, vocab: int) -> Tensor:
    """[N, vocab]"""
    bias = None if head.bias is None else head.bias[:vocab].to(head.dtype)
    product = torch.nn.functional.linear(head.rows.to(head.dtype), head.weight[:vocab].to(head.dtype), bias)
    return product if head.softcap is None else head.softcap * (product / head.softcap).tanh()
