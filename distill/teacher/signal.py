"""One type for what a teacher gives for a micro-batch, whether it runs live or is read from a cache.

Shapes: B rows, S positions, N requested positions, H hidden size, V vocabulary, K kept entries.
"""

from collections.abc import Callable, Iterator
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


class Signal(NamedTuple):
    """What a teacher gives for one micro-batch."""

    logits_source: Head | TopK | None  # what losses over the vocabulary read, at the N positions; None: nothing
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
    scaled = (logits if logits.dtype == torch.float64 else logits.float()) / temperature
    values, ids = scaled.topk(count)
    rest = scaled.scatter(1, ids, -torch.inf).logsumexp(-1, keepdim=True)
    return TopK(ids, torch.cat([values, rest], 1).log_softmax(-1))
