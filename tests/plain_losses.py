"""The losses over the vocabulary as one would write them: what the losses in chunks are compared with.

Shapes: N rows, V vocabulary, M terms.
"""

import copy
from collections.abc import Sequence

import torch
from torch import Tensor

from distill.models.language_model import Head
from distill.objective.chunked import on_its_rows
from distill.objective.terms import VocabularyTerm
from distill.teacher.distributions import Distribution, Logits, Mixture, Single


class PlainLosses:
    """All logits of both models, then each term's formula; called as the losses in chunks are."""

    def __init__(self, terms: Sequence[VocabularyTerm], vocab: int, *_: object, **__: object) -> None:
        self.terms, self.vocab = terms, vocab

    def __call__(
        self, student: Head, teacher: Distribution | None, targets: Tensor, scales: Tensor
    ) -> tuple[Tensor, Tensor]:
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


def by_formulas(terms: Sequence[VocabularyTerm]) -> list[VocabularyTerm]:
    """The same terms, of classes of a user's: what is written by hand knows nothing of them."""
    return [_of_a_subclass(term) for term in terms]


def _of_a_subclass(term: VocabularyTerm) -> VocabularyTerm:
    other = copy.copy(term)
    other.__class__ = type("Own", (type(term),), {})
    return other
