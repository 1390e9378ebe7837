"""Losses of a block of rows, and their gradient written over the logits: by hand where there is a kernel, or autograd.

Shapes: n rows of a block, V vocabulary, M terms.
"""

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from distill.objective.kernel import NO_TARGET, compiled_kernel, soft_and_tokens
from distill.objective.terms import ALL, VocabularyTerm
from distill.objective.terms.clm import Clm
from distill.objective.terms.mlm import Mlm
from distill.objective.terms.soft import Soft
from distill.teacher.distributions import Single, biased


class Block(Protocol):
    """Losses and gradient of a block of rows.

    Attributes:
        num_bytes: of the logits that are visited at once on a CPU: few enough to stay in the processor's cache.
        reads_teacher, reads_targets: whether a term does.
        every_row: whether rows without a target carry a term even where there is no teacher.
        parameters: those of the terms' modules that are trained.
        gradients: of the scaled losses with respect to them, added up over the calls since `begin`.
    """

    num_bytes: int
    reads_teacher: bool
    reads_targets: bool
    every_row: bool
    parameters: Sequence[Tensor]
    gradients: Sequence[Tensor]

    def begin(self) -> None:
        """Add up `gradients` from 0 again."""
        ...

    def __call__(
        self, logits: Tensor, bias: Tensor | None, teacher: Single | None, targets: Tensor | None, scales: Tensor
    ) -> Tensor:
        """Losses [M, n]; `logits` [n, V], before the bias, is overwritten with the gradient of the scaled losses.

        targets [n] int64, NO_TARGET in a row without one; None where no row of the block has one. scales [M].
        """
        ...


class ByFormulas:
    """Any terms over the vocabulary, each by its own formula; the gradient is autograd's, inside the block."""

    num_bytes = 1 << 20
    reads_teacher = reads_targets = True
    gradients: Sequence[Tensor]

    def __init__(self, terms: Sequence[VocabularyTerm]) -> None:
        self.terms = terms
        self.every_row = any(term.positions == ALL for term in terms)
        modules = [term.module for term in terms if term.module is not None]
        parameters = (parameter for module in modules for parameter in module.parameters() if parameter.requires_grad)
        self.parameters: Sequence[Tensor] = list(dict.fromkeys(parameters))  # terms may share a module
        self.begin()

    def begin(self) -> None:
        self.gradients = [torch.zeros_like(parameter) for parameter in self.parameters]

    def __call__(
        self, logits: Tensor, bias: Tensor | None, teacher: Single | None, targets: Tensor | None, scales: Tensor
    ) -> Tensor:
        z = biased(logits, bias, scales.dtype).detach().requires_grad_()
        y = None if teacher is None else teacher.as_read_by_terms(scales.dtype)
        if targets is None:
            targets = torch.full((len(z),), NO_TARGET, device=z.device)
        with torch.enable_grad():
            losses = torch.stack([on_its_rows(term, term.losses(z, y, targets), targets) for term in self.terms])
            loss, inputs = (scales[:, None] * losses).sum(), [z, *self.parameters]
            # A term need not use all of its module at once.
            gradient, *of_modules = torch.autograd.grad(loss, inputs, materialize_grads=bool(self.parameters))
        logits.copy_(gradient)
        for total, part in zip(self.gradients, of_modules, strict=True):
            total.add_(part)
        return losses.detach()


class ByHand:
    """Soft targets and the cross-entropy of tokens, in this order, by the kernel; either may be absent, and is 0."""

    every_row = False
    parameters: Sequence[Tensor] = ()
    gradients: Sequence[Tensor] = ()

    def __init__(self, soft: Soft | None, tokens: Mlm | Clm | None, compiled: bool) -> None:
        """`compiled`: through torch.compile, where there is a compiler."""
        self.reads_teacher, self.reads_targets = soft is not None, tokens is not None
        self.temperature, self.cutoff = (soft.temperature, soft.cutoff) if soft else (1.0, 0.0)
        self.kernel = compiled_kernel if compiled else soft_and_tokens
        self.num_bytes = 1 << 22 if compiled else 1 << 20  # compiled, it visits each row on its own: fewer calls

    def begin(self) -> None:
        return None

    def __call__(
        self, logits: Tensor, bias: Tensor | None, teacher: Single | None, targets: Tensor | None, scales: Tensor
    ) -> Tensor:
        column = targets[:, None] if self.reads_targets and targets is not None else None
        teacher = teacher if self.reads_teacher else None
        losses: Tensor = self.kernel(logits, bias, teacher, column, scales, self.temperature, self.cutoff)
        return losses


class Both(ByFormulas):
    """The kernel's two terms and then further ones over the same rows; the gradients are added up."""

    def __init__(self, by_hand: ByHand, further: Sequence[VocabularyTerm]) -> None:
        super().__init__(further)
        self.by_hand = by_hand

    def __call__(
        self, logits: Tensor, bias: Tensor | None, teacher: Single | None, targets: Tensor | None, scales: Tensor
    ) -> Tensor:
        gradient = logits.clone()
        further = super().__call__(gradient, bias, teacher, targets, scales[2:])
        losses = torch.cat([self.by_hand(logits, bias, teacher, targets, scales[:2]), further])
        logits.add_(gradient)
        return losses


def averaged(
    block: Block,
    logits: Tensor,
    bias: Tensor | None,
    teachers: Sequence[tuple[float, Single | None]],
    targets: Tensor | None,
    scales: Tensor,
) -> Tensor:
    """A block's losses and gradient, each the mean over several teachers by their weights.

    Losses that need no teacher come out as they are, as the weights add up to 1.
    """
    if len(teachers) == 1:
        return block(logits, bias, teachers[0][1], targets, scales)
    gradient, losses = torch.zeros_like(logits, dtype=scales.dtype), []
    for weight, teacher in teachers:
        part = logits.clone()
        losses.append(weight * block(part, bias, teacher, targets, weight * scales))
        gradient += part
    logits.copy_(gradient)
    return torch.stack(losses).sum(0)


def on_its_rows(term: VocabularyTerm, losses: Tensor, targets: Tensor) -> Tensor:
    """[n] -> [n], 0 in the rows that do not carry the term."""
    return losses if term.positions == ALL else torch.where(targets == NO_TARGET, torch.zeros_like(losses), losses)


def pieces(start: int, stop: int, size: int) -> Iterator[tuple[int, int]]:
    """[start, stop) cut into pieces of at most `size`, at least 1."""
    return ((low, min(low + size, stop)) for low in range(start, stop, max(size, 1)))


def rows_at_once(num_bytes: int, vocab: int, like: Tensor) -> int:
    """How many rows of logits, in the format of `like`, go through a block at once; a GPU has no use for blocks."""
    return max(1, num_bytes // (max(vocab, 1) * like.dtype.itemsize)) if like.device.type == "cpu" else 1 << 30
