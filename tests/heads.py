"""Heads with rows, and the checks that the one visit to them agrees with the plain losses on full logits."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear

from distill.models.language_model import Head
from distill.objective import losses
from distill.objective.chunked import CPU, NO_TARGET, ChunkedLosses, Tiling
from distill.objective.terms.mlm import Mlm
from distill.objective.terms.soft import Soft
from distill.teacher.distributions import TopK, top_k_log_probs

VOCAB, WIDTH, TEACHER_WIDTH = 1271, 24, 32
BOTH_HEADS = VOCAB * 4 * 2  # bytes of one row's logits in fp32


@dataclass
class Problem:
    """Heads whose vocabularies are padded to different sizes, and what each row carries."""

    student: Head
    teacher: Head | None
    targets: Tensor | None
    cutoff: float = 0.0
    temperature: float = 2.0
    vocab: int = VOCAB
    kept: int | None = None  # the teacher is known by so many of its entries, rounded

    def top_k(self) -> TopK:
        logits = linear(*self.teacher[:3])[:, : self.vocab]
        ids, log_probs = top_k_log_probs(logits, self.kept or 0, self.temperature)
        return TopK(ids.int(), log_probs.half())

    def plain(self) -> tuple[Tensor, Tensor]:
        soft = mlm = self.student.rows.new_zeros(())
        logits = linear(*self.student[:3])[:, : self.vocab]
        if self.teacher is not None:
            if self.kept is None:
                values = losses.soft(logits, linear(*self.teacher[:3])[:, : self.vocab], self.temperature, self.cutoff)
            else:
                values = losses.soft_topk(logits, *self.top_k(), self.temperature)
            soft = values.sum()
        if self.targets is not None:
            mlm = losses.mlm(logits, self.targets).sum()
        return 0.3 * soft + 0.07 * mlm, torch.stack([soft, mlm]).detach()

    def fused(
        self, *, student: Head | None = None, budget: int = 0, tiling: Tiling = CPU, compiled: bool = False
    ) -> tuple[Tensor, ...]:
        soft = Soft(self.temperature)
        soft.cutoff = self.cutoff  # also one that the setting refuses, which cuts everything
        teacher = self.teacher if self.kept is None else self.top_k()
        student = student or self.student
        scales = torch.tensor([0.3, 0.07], dtype=torch.promote_types(student.rows.dtype, torch.float32))
        targets = torch.full((len(student.rows),), NO_TARGET) if self.targets is None else self.targets
        tiling = tiling._replace(budget=budget or tiling.budget)
        return ChunkedLosses([soft, Mlm()], self.vocab, compiled, tiling)(student, teacher, targets, scales)


def problem(
    rows: int = 41,
    dtype: torch.dtype = torch.float32,
    masked: float = 0.15,
    bias: bool = True,
    vocab: int = VOCAB,
) -> Problem:
    torch.manual_seed(rows)

    def draw(*shape: int, scale: float = 1.0, trained: bool = False) -> Tensor:
        return (torch.randn(*shape) * scale).to(dtype).requires_grad_(trained)

    def head(width: int, padded: int, trained: bool) -> Head:
        weight = draw(padded, width, scale=3 * width**-0.5, trained=trained)
        return Head(draw(rows, width, trained=trained), weight, draw(padded, trained=trained) if bias else None)

    targets = torch.where(torch.rand(rows) < masked, torch.randint(vocab, (rows,)), NO_TARGET)
    student, teacher = head(WIDTH, vocab + 9, True), head(TEACHER_WIDTH, vocab + 1, False)
    return Problem(student, teacher, targets, vocab=vocab)


def gradients(loss: Tensor, head: Head, upstream: float = 1.0) -> list[Tensor]:
    tensors = [tensor for tensor in head[:3] if tensor is not None]
    return list(torch.autograd.grad(loss * upstream, tensors, materialize_grads=True))


def assert_agrees(case: Problem, relative: float = 3e-6, upstream: float = 1.0, **options: object) -> None:
    """Loss, both sums and all gradients are the plain path's, relative to the largest entry."""
    want, want_sums = case.plain()
    got, got_sums = case.fused(**options)
    torch.testing.assert_close(got, want, rtol=relative, atol=5 * relative)  # rounding of logits near 10, many rows
    torch.testing.assert_close(got_sums, want_sums, rtol=relative, atol=5 * relative)
    assert not got_sums.requires_grad
    pairs = zip(gradients(got, case.student, upstream), gradients(want, case.student, upstream), strict=True)
    for mine, reference in pairs:
        assert mine.dtype == reference.dtype and mine.shape == reference.shape
        largest = reference.abs().max().item() if reference.numel() else 0.0
        torch.testing.assert_close(mine, reference, rtol=0, atol=relative * max(largest, 1e-6))


def largest_allocation(run: Callable[[], None]) -> int:
    with torch.profiler.profile(profile_memory=True) as profile:
        run()
    events = profile.profiler.kineto_results.events()
    return max(event.nbytes() for event in events if event.name() == "[memory]")
