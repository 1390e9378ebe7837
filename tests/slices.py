"""Losses over a sliced vocabulary: each rank checks its part of the whole, in value and gradient."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import linear

from distill.models.language_model import Head
from distill.objective.blocks import NO_TARGET
from distill.objective.terms import VocabularyTerm
from distill.objective.vocabulary import reference_loss, vocabulary_loss
from distill.objective.vocabulary_parallel import sliced_loss
from distill.teacher.layout import Layout
from distill.teacher.sampling import as_samples, kept_entries
from distill.teacher.signal import Mixture, Samples, TopK, rows_of, top_k_log_probs

VOCAB, WIDTH, TEACHER_WIDTH = 53, 8, 12  # a prime: no number of ranks divides it
ROWS = {2: (7, 4), 3: (5, 0, 6)}
WEIGHTS = (0.5, 0.2, 0.3)
LIVE, TOP_K, NONE, SEVERAL, SEVERAL_KINDS = "live", "top k", "none", "several", "several, live and cached"
SAMPLES = "samples"


@dataclass
class Case:
    """A loss, and the heads that it is for.

    Attributes:
        padded: entries of the student's weight and the teacher's.
        slices: lengths of every head's slices; None: as torch's Shard(0) cuts.
        budget: rows of both heads' logits.
    """

    terms: list[VocabularyTerm]
    teacher: str = LIVE
    padded: tuple[int, int] = (VOCAB + 4, VOCAB + 4)
    slices: tuple[int, ...] | None = None
    rows: tuple[int, ...] | None = None
    bias: bool = True
    softcap: float | None = None
    budget: int = 10**6
    dtype: torch.dtype = torch.float64
    matrix_dtype: torch.dtype | None = None
    upstream: float = 1.0
    relative: float = 1e-12
    spread: float = 3.0  # of the logits
    masked: float = 0.4
    compiled: bool = False

    def draw(self, *shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(*shape, generator=self.random, dtype=torch.float64).mul(scale).to(self.dtype)

    def head(self, width: int, padded: int) -> Head:
        """With entries beyond the vocabulary that would take all the probability."""
        weight, bias = self.draw(padded, width, scale=self.spread * width**-0.5), self.draw(padded)
        bias[VOCAB:] = 50.0
        rows = self.draw(sum(self.counts), width)
        has_bias = self.bias and self.softcap is None
        return Head(rows, weight, bias if has_bias else None, self.matrix_dtype or self.dtype, None, self.softcap)

    def known(self, head: Head) -> TopK:
        exact = linear(*(None if each is None else each.double() for each in head[:3]))[:, :VOCAB]
        ids, log_probs = top_k_log_probs(exact, 30, 2.0)  # more than a slice of 3 holds in places
        return TopK(ids.short(), log_probs.half())

    def drawn(self, head: Head) -> Samples:
        exact = linear(*(None if each is None else each.double() for each in head[:3]))[:, :VOCAB]
        layout, offsets = Layout(4, 40, 0.7, VOCAB), torch.rand(len(exact), generator=self.random)
        return as_samples(kept_entries(exact, layout, 2.0, offsets.double()), layout)

    def make(self, size: int) -> None:
        self.counts = self.rows or ROWS[size]
        self.random = torch.Generator().manual_seed(7)
        self.student = self.head(WIDTH, self.padded[0])
        members = [self.head(TEACHER_WIDTH, self.padded[1] + more) for more in (0, 0, 5)]
        self.source: Any = {
            NONE: None,
            LIVE: members[0],
            TOP_K: self.known(members[0]),
            SAMPLES: self.drawn(members[0]),
            SEVERAL: Mixture(tuple(members), WEIGHTS, 2.0),
            SEVERAL_KINDS: Mixture((members[0], self.known(members[1]), self.drawn(members[2])), WEIGHTS, 2.0),
        }[self.teacher]
        words = torch.randint(VOCAB, (sum(self.counts),), generator=self.random)
        on = torch.rand(len(words), generator=self.random) < self.masked
        self.targets = torch.where(on, words, NO_TARGET)
        accurate = torch.promote_types(self.dtype, torch.float32)
        self.scales = torch.linspace(0.2, 0.9, len(self.terms), dtype=accurate)

    def reference(self, rank: int) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Loss and sums of a rank's rows, and the gradients of the loss of all, by all logits in float64."""
        student = _in_float64(self.student)
        tensors = [each.requires_grad_() for each in student[:3] if each is not None]
        terms, source, scales = self.terms, _in_float64(self.source), self.scales.double()
        loss, _ = reference_loss(terms, student, source, self.targets, scales, VOCAB)
        own = self.own(rank)
        part = (_of_rows(student, own), _of_rows(source, own), self.targets[own])
        value, sums = reference_loss(terms, *part, scales, VOCAB)
        return value.detach(), sums, list(torch.autograd.grad(loss * self.upstream, tensors, materialize_grads=True))

    def own(self, rank: int) -> slice:
        return slice(sum(self.counts[:rank]), sum(self.counts[: rank + 1]))

    def part(self, group: dist.ProcessGroup) -> tuple[Head, Any, Tensor]:
        """What a rank has: its slices with its rows of student and teacher, and its targets."""
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        self.make(size)
        own = self.own(rank)
        student, source = (
            _of_slice(_of_rows(each, own), rank, size, self.slices) for each in (self.student, self.source)
        )
        return student, source, self.targets[own]

    def loss(self, group: dist.ProcessGroup, student: Head, source: Any, targets: Tensor) -> tuple[Tensor, Tensor]:
        visit = partial(sliced_loss, group=group, budget=self.budget)
        return vocabulary_loss(self.terms, student, source, targets, self.scales, VOCAB, self.compiled, visit)

    def run(self, group: dist.ProcessGroup) -> None:
        """Raises AssertionError where this rank does not get what is its part of the whole."""
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        mine, source, targets = self.part(group)
        tensors = [each.clone().requires_grad_() for each in mine[:3] if each is not None]
        mine = mine._replace(rows=tensors[0], weight=tensors[1], bias=tensors[2] if len(tensors) > 2 else None)
        loss, sums = self.loss(group, mine, source, targets)
        got = torch.autograd.grad(loss * self.upstream, tensors, materialize_grads=True)
        value, want_sums, gradients = self.reference(rank)
        torch.testing.assert_close((loss.double(), sums.double()), (value, want_sums), rtol=self.relative, atol=1e-9)
        starts = slice_of(len(self.student.weight), rank, size, self.slices)
        wanted = [gradients[0][self.own(rank)], *(each[starts] for each in gradients[1:])]
        for found, want, whole, tensor in zip(got, wanted, gradients, tensors, strict=True):
            assert found.dtype == tensor.dtype and found.shape == tensor.shape
            largest = whole.abs().max().item() if whole.numel() else 0.0
            torch.testing.assert_close(found.double(), want, rtol=0, atol=self.relative * max(largest, 1e-6))


def _in_float64(source: Any) -> Any:
    if isinstance(source, Mixture):
        return source._replace(members=tuple(map(_in_float64, source.members)))
    if isinstance(source, Head):
        rows, weight, bias = (None if each is None else each.double() for each in source[:3])
        return Head(rows, weight, bias, torch.float64, None, source.softcap)
    return source


def _of_rows(source: Any, rows: slice) -> Any:
    if isinstance(source, Mixture):
        return source._replace(members=tuple(_of_rows(each, rows) for each in source.members))
    if isinstance(source, TopK | Samples):
        return rows_of(source, rows)
    return source and source._replace(rows=source.rows[rows])


def slice_of(length: int, rank: int, size: int, lengths: tuple[int, ...] | None) -> slice:
    """The entries of a rank: by these lengths, or -(-length // size) each, the last ones fewer, as Shard(0) cuts."""
    if lengths is None:
        step = -(-length // size)
        return slice(min(rank * step, length), min((rank + 1) * step, length))
    return slice(sum(lengths[:rank]), sum(lengths[: rank + 1]))


def _of_slice(source: Any, rank: int, size: int, lengths: tuple[int, ...] | None) -> Any:
    if isinstance(source, Mixture):
        return source._replace(members=tuple(_of_slice(each, rank, size, lengths) for each in source.members))
    if not isinstance(source, Head):
        return source
    here = slice_of(len(source.weight), rank, size, lengths)
    return source._replace(weight=source.weight[here], bias=None if source.bias is None else source.bias[here])
