"""How the states of Metrics are exchanged: through the ranks at hand, which may not be those of torch.distributed.

What a Metric takes as `dist_sync_fn` gets a state of this rank and gives a list whose reduction is that of all ranks.
"""

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypedDict

import torch
from torch import Tensor

from distill.distributed import Ranks

if TYPE_CHECKING:
    from torchmetrics import Metric

NARROW = (torch.bool, torch.uint8, torch.int8, torch.int16)  # types that not every communication library sums


class Exchange(TypedDict):
    """Arguments of every torchmetrics Metric."""

    dist_sync_fn: Callable[..., list[Tensor]]
    distributed_available_fn: Callable[[], bool]


def sum_exchange(ranks: Ranks) -> Exchange:
    """Arguments of a Metric whose states are sums alone: each of them takes one exchange of its own size."""
    return _through(ranks, lambda state: [ranks.sum(state)])


def gather_exchange(ranks: Ranks) -> Exchange:
    """Arguments of any Metric: the states of all ranks in their order, which may differ in shape."""
    return _through(ranks, lambda state: gather(state, ranks))


def gather(state: Tensor, ranks: Ranks) -> list[Tensor]:
    """This tensor of every rank. Those without an element may have another shape and type; they take the others'."""
    facts = ranks.gather([list(state.shape), str(state.dtype).removeprefix("torch.")])
    usual, name = next((fact for fact in facts if 0 not in fact[0]), facts[0])
    dtype = getattr(torch, name)
    shapes = [shape if len(shape) == len(usual) else [0, *usual[1:]] for shape, _ in facts]
    counts = [torch.Size(shape).numel() for shape in shapes]
    # Every rank fills in its own part of zeros, and adding zeros changes nothing.
    table = torch.zeros(sum(counts), dtype=torch.int32 if dtype in NARROW else dtype, device=state.device)
    if state.numel():
        start = sum(counts[: ranks.rank])
        table[start : start + state.numel()] = state.reshape(-1)
    parts = ranks.sum(table).to(dtype).split(counts)
    return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]


def compute_metric(metric: "Metric") -> Any:
    """Compute the value over all ranks, which all call this; a rank may have updated no state."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return metric.compute()


def _through(ranks: Ranks, exchange: Callable[[Tensor], list[Tensor]]) -> Exchange:
    def sync(state: Tensor, group: Any = None) -> list[Tensor]:
        return exchange(state)

    return Exchange(dist_sync_fn=sync, distributed_available_fn=lambda: ranks.size > 1)
