"""Heads with rows, and the check that the losses in chunks agree with the plain losses on all logits in float64."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from plain_losses import PlainLosses
from torch import Tensor

from distill.models.language_model import Head
from distill.objective.chunked import CPU, NO_TARGET, ChunkedLosses, Tiling
from distill.objective.terms import VocabularyTerm
from distill.objective.terms.mlm import Mlm
from distill.objective.terms.soft import Soft
from distill.teacher.distributions import Distribution, Mixture, Samples
from distill.teacher.sampling import as_samples, kept_entries

VOCAB, WIDTH, TEACHER_WIDTH = 1271, 24, 32
BOTH_HEADS = VOCAB * 4 * 2  # bytes of one row's logits in fp32


@dataclass
class Problem:
    """What each row carries, and the terms that act on it."""

    student: Head
    teacher: Distribution | None
    targets: Tensor
    terms: list[VocabularyTerm]
    vocab: int = VOCAB

    def chunked(
        self, terms: Any = None, student: Head | None = None, tiling: Tiling = CPU, compiled: bool = False, **more: Any
    ) -> tuple[Tensor, Tensor]:
        """Loss and sums; `more`: of the tiling."""
        losses = ChunkedLosses(terms or self.terms, self.vocab, compiled, tiling._replace(**more))
        student = student or self.student
        dtype = torch.promote_types(student.rows.dtype, torch.float32)
        return losses(student, self.teacher, self.targets, self.scales.to(dtype))

    def exact(self, upstream: float = 1.0) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Loss, sums and gradients of all logits in float64."""
        student = _in_float64(self.student)
        loss, sums = PlainLosses(self.terms, self.vocab)(student, _exact(self.teacher), self.targets, self.scales)
        return loss.detach(), sums, gradients(loss, student, upstream)

    @property
    def scales(self) -> Tensor:
        return torch.linspace(0.3, 0.07, len(self.terms), dtype=torch.float64)

    def assert_agrees(self, relative: float = 1e-5, upstream: float = 1.0, **options: Any) -> None:
        """Loss, sums and all gradients, relative to the largest entry, are those of all logits."""
        want, want_sums, references = self.exact(upstream)
        loss, sums = self.chunked(**options)
        torch.testing.assert_close((loss.double(), sums.double()), (want, want_sums), rtol=relative, atol=10 * relative)
        assert not sums.requires_grad
        for found, wanted in zip(gradients(loss, self.student, upstream), references, strict=True):
            largest = wanted.abs().max().item() if wanted.numel() else 0.0
            torch.testing.assert_close(found.double(), wanted, rtol=0, atol=relative * max(largest, 1e-6))


def _in_float64(head: Head) -> Head:
    tensors = (None if each is None else each.detach().double().requires_grad_() for each in head[:3])
    return Head(*tensors, torch.float64, softcap=head.softcap)


def _exact(teacher: Distribution | None) -> Distribution | None:
    if isinstance(teacher, Mixture):
        return teacher._replace(members=tuple(_exact(member) for member in teacher.members))
    return _in_float64(teacher) if isinstance(teacher, Head) else teacher


def problem(
    rows: int = 41, dtype: torch.dtype = torch.float32, masked: float = 0.15, bias: bool = True, vocab: int = VOCAB
) -> Problem:
    """Soft targets and masked tokens; the vocabularies are padded to different sizes."""
    torch.manual_seed(rows)

    def values(*shape: int, scale: float = 1.0, trained: bool = False) -> Tensor:
        return (torch.randn(*shape) * scale).to(dtype).requires_grad_(trained)

    def head(width: int, padded: int, trained: bool) -> Head:
        weight = values(padded, width, scale=3 * width**-0.5, trained=trained)
        return Head(values(rows, width, trained=trained), weight, values(padded, trained=trained) if bias else None)

    targets = torch.where(torch.rand(rows) < masked, torch.randint(vocab, (rows,)), NO_TARGET)
    student, teacher = head(WIDTH, vocab + 9, True), head(TEACHER_WIDTH, vocab + 1, False)
    return Problem(student, teacher, targets, [Soft(), Mlm()], vocab)


def samples(rows: int = 41, kept: int = 4, temperature: float = 2.0, seed: int = 3) -> Samples:
    """What is read of a teacher that is known by samples."""
    random = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(rows, VOCAB, generator=random)
    offsets = torch.rand(rows, generator=random, dtype=torch.float64)
    found = as_samples(kept_entries(logits, kept, 20, temperature, offsets))
    return found._replace(ids=found.ids.int())  # as they are read


def gradients(loss: Tensor, head: Head, upstream: float = 1.0) -> list[Tensor]:
    tensors = [tensor for tensor in head[:3] if tensor is not None]
    return list(torch.autograd.grad(loss * upstream, tensors, materialize_grads=True))


def largest_allocation(run: Callable[[], object]) -> int:
    with torch.profiler.profile(profile_memory=True) as profile:
        run()
    events = profile.profiler.kineto_results.events()
    return max(event.nbytes() for event in events if event.name() == "[memory]")
