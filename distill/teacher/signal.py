"""One type for what a teacher gives for a micro-batch, whether it runs live or is read from a cache.

Shapes: B rows, S positions, N requested positions, H hidden size, V vocabulary, K or J kept entries.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from distill.data.batch import Batch
from distill.models.language_model import NO_OUTPUTS, Head, Outputs, OutputSpec

# What the objective wants of the teacher for a micro-batch.
Wanted = Callable[[Batch], OutputSpec]


class TopK(NamedTuple):
    """A teacher known by its largest entries: ids [N, K] (any integers), log_probs [N, K + 1], the last of all others.

    The log-probabilities hold at the run's temperature; they may be rounded, as they are normalised on use. K < V.
    """

    ids: Tensor
    log_probs: Tensor


class Samples(NamedTuple):
    """A teacher known by an unbiased estimate of its distribution p: weights at some entries, 0 at all others.

    ids [N, J] (any integers; one that stands there twice has the sum of its weights), weights [N, J] at least fp32,
    whose mean over the draws is p and which need not add up to 1, and neg_entropy [N, 1], the sum of p log p, so that a
    cross-entropy with the weights becomes a divergence. All of it holds at the run's temperature.
    """

    ids: Tensor
    weights: Tensor
    neg_entropy: Tensor


Sparse = TopK | Samples  # a teacher known by some of its entries, as caches give it


def rows_of(source: Sparse, rows: Tensor | slice) -> Sparse:
    """The entries at some of the positions."""
    if isinstance(source, TopK):
        return TopK(*(each[rows] for each in source))
    return Samples(*(each[rows] for each in source))


class Mixture(NamedTuple):
    """Several teachers at the same positions, with their shares in the mixture, which add up to 1.

    Where all of them run live they stand for one distribution, the mean of all at `temperature`. Where one is known
    by some of its entries only, every loss is the mean of the members' own: for soft targets that has the gradient of
    the mixture, since KL(p || q) is linear in p but for a constant.
    """

    members: tuple[Head | Sparse, ...]
    weights: tuple[float, ...]
    temperature: float = 1.0  # at which probabilities are averaged; the objective sets that of its terms

    @property
    def live(self) -> bool:
        """Whether all members give their logits."""
        return all(isinstance(member, Head) for member in self.members)


class Signal(NamedTuple):
    """What a teacher gives for one micro-batch."""

    logits_source: (
        Head | Sparse | Mixture | None
    )  # what losses over the vocabulary read, at the N positions; None: nothing
    outputs: Outputs  # hidden states by layer; empty where none were requested


class Teacher(Protocol):
    """A frozen model, or what is kept of one. Nothing outside of this package depends on which it is."""

    def read_ahead(self, batch: Batch) -> Batch:
        """The batch with what can be read before its step; called in the threads that prepare batches."""
        ...

    def signals(self, window: list[Batch], wanted: Wanted) -> Iterator[Signal]:
        """What the teacher gives for each micro-batch of a window, in order."""
        ...


class NoTeacher:
    """The teacher of a run without one: it gives nothing, and the objective has no term that would need it."""

    def read_ahead(self, batch: Batch) -> Batch:
        return batch

    def signals(self, window: list[Batch], wanted: Wanted) -> Iterator[Signal]:
        for _ in window:
            yield Signal(None, NO_OUTPUTS)


def top_k_log_probs(logits: Tensor, count: int, temperature: float) -> TopK:
    """The `count` = K largest entries of logits [N, V] at a temperature, and the joint mass of all others.

    Returns ids int64 [N, K] and log_probs [N, K + 1], at least fp32; there has to be another entry: K < V.
    """
    scaled = at_least_fp32(logits) / temperature
    values, ids = scaled.topk(count)
    rest = scaled.scatter(1, ids, -torch.inf).logsumexp(-1, keepdim=True)
    return TopK(ids, torch.cat([values, rest], 1).log_softmax(-1))


def at_least_fp32(values: Tensor) -> Tensor:
    """float64 stays as it is, everything else becomes fp32."""
    return values if values.dtype == torch.float64 else values.float()


def mixed_logits(members: Iterable[Tensor], weights: Sequence[float], temperature: float) -> Tensor:
    """Teachers' logits z_k [N, V] -> logits y [N, V] of their mean distribution at a temperature T, in at least fp32.

    softmax(y / T) is the sum over the members k of w_k * softmax(z_k / T), as y = T * logsumexp over k of (log w_k +
    log_softmax(z_k / T)). The probabilities are averaged at T itself: mixed at 1 and divided by T afterwards they would
    be others. y is determined up to a constant; this one makes softmax(y / T) = exp(y / T).
    """
    total: Tensor | None = None
    for logits, weight in zip(members, weights, strict=True):
        scaled = at_least_fp32(logits) / temperature
        part = scaled.log_softmax(-1) + math.log(weight)
        total = part if total is None else torch.logaddexp(total, part)
    assert total is not None
    return temperature * total
