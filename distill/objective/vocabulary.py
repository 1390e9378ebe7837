"""All losses over the vocabulary at once: on full logits for reading, or in chunks that keep none.

Shapes: N rows, V vocabulary, M terms.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from distill.models.language_model import Head
from distill.objective.blocks import Block, Both, ByFormulas, ByHand, on_its_rows
from distill.objective.fused import BUDGET, chunked_loss
from distill.objective.terms import ALL, VocabularyTerm
from distill.objective.terms.clm import Clm
from distill.objective.terms.mlm import Mlm
from distill.objective.terms.soft import Soft
from distill.runtime.errors import SettingError
from distill.teacher.distributions import Distribution, Logits, Mixture, Single


class PlainLosses:
    """As one would write it: all logits of both models, then each term's formula."""

    def __init__(self, terms: Sequence[VocabularyTerm], vocab: int) -> None:
        """`vocab`: how many of the first entries of either head count."""
        self.terms, self.vocab = terms, vocab

    def __call__(
        self, student: Head, teacher: Distribution | None, targets: Tensor, scales: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Sum over the terms of scale * sum over their rows, and the unscaled sums [M], detached.

        Args:
            teacher: of the same rows; None where no term needs a teacher.
            targets: [N] int64, -100 in a row without one.
            scales: [M], in the format that elementwise work is done in.
        """
        mixture, losses, sums = Mixture.of(teacher), [], []
        members = [self._single(member) for member in mixture.members]
        dtype = torch.promote_types(student.dtype or student.rows.dtype, scales.dtype)
        for weight, single in mixture.combined(members, dtype):
            z, y = self._logits(student), None if single is None else single.as_read_by_terms(dtype)
            values = [on_its_rows(term, term.losses(z, y, targets), targets).sum() for term in self.terms]
            losses.append(weight * (scales * torch.stack(values)).sum())
            sums.append(weight * torch.stack(values).detach())
        return torch.stack(losses).sum(0), torch.stack(sums).sum(0)

    def _single(self, member: Head | Single) -> Single:
        return Logits(self._logits(member)) if isinstance(member, Head) else member

    def _logits(self, head: Head) -> Tensor:
        """[N, vocab]"""
        bias = None if head.bias is None else head.bias[: self.vocab].to(head.dtype)
        weight = head.weight[: self.vocab].to(head.dtype)
        product = torch.nn.functional.linear(head.rows.to(head.dtype), weight, bias)
        return product if head.softcap is None else head.softcap * (product / head.softcap).tanh()


class ChunkedLosses:
    """In chunks of rows that keep no logits; soft targets and tokens by hand, any other terms by their formulas."""

    def __init__(
        self, terms: Sequence[VocabularyTerm], vocab: int, compiled: bool = False, budget: int = BUDGET
    ) -> None:
        """
        Args:
            vocab: how many of the first entries of either head count.
            compiled: run what is written by hand through torch.compile, where there is a compiler.
            budget: bounds, in bytes, the logits that exist at once.
        """
        self.vocab, self.budget = vocab, budget
        soft, tokens, further = by_hand(terms)
        self.block: Block
        self.numbers: list[int | None]
        if soft is None and tokens is None:
            self.block, self.numbers = ByFormulas(further), list(range(len(terms)))
            return
        kernel = ByHand(soft, tokens, compiled)
        self.block = Both(kernel, further) if further else kernel
        # The block's order: a term of the kernel that is absent has no number, and no scale.
        self.numbers = [None if term is None else terms.index(term) for term in (soft, tokens, *further)]

    def __call__(
        self, student: Head, teacher: Distribution | None, targets: Tensor, scales: Tensor
    ) -> tuple[Tensor, Tensor]:
        none = scales.new_zeros(())
        ordered = torch.stack([none if number is None else scales[number] for number in self.numbers])
        loss, sums = chunked_loss(
            student,
            teacher if self.block.reads_teacher else None,
            targets if self.block.reads_targets else None,
            self.block,
            ordered,
            vocab=self.vocab,
            budget=self.budget,
        )
        return loss, torch.stack([sums[self.numbers.index(number)] for number in range(len(scales))])


class Kernel(NamedTuple):
    """The terms of some that the kernel takes, and all others."""

    soft: Soft | None
    tokens: Mlm | Clm | None
    further: list[VocabularyTerm]


def by_hand(terms: Sequence[VocabularyTerm]) -> Kernel:
    """What the kernel takes of the terms: a soft term, and a cross-entropy of masked or next tokens.

    A class that inherits from these two may compute something else. The kernel has soft targets in every row that is
    visited, so a soft term of masked positions is among the others where further rows are visited for their sake.
    """
    all_rows = any(term.positions == ALL for term in terms)
    soft = next((term for term in terms if type(term) is Soft and (term.positions == ALL) == all_rows), None)
    tokens = next((term for term in terms if isinstance(term, Mlm | Clm) and type(term) in (Mlm, Clm)), None)
    return Kernel(soft, tokens, [term for term in terms if term is not soft and term is not tokens])


def mixing_temperature(terms: Mapping[str, VocabularyTerm], scheduled: Mapping[str, Any] | None = None) -> float:
    """At which the probabilities of several teachers are averaged: that of the terms, by name, which read them.

    Args:
        scheduled: the temperatures that follow a schedule, which have to be the same over the whole run.

    Raises:
        SettingError: two of them have different ones.
    """
    temperatures: dict[str, Any] = {
        name: (scheduled or {}).get(name) or getattr(term, "temperature", 1.0)
        for name, term in terms.items()
        if term.needs_teacher and term.reads_probabilities
    }
    if len(set(temperatures.values())) > 1:
        values = ", ".join(f"objective.{name}.temperature={value}" for name, value in temperatures.items())
        raise SettingError(
            f"teacher.members averages probabilities at one temperature, but there are {values}: give them the "
            "same (a term of your own that takes no temperature reads them at 1)"
        )
    first: float = next(iter(temperatures.values()), 1.0)
    return first
