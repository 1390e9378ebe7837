"""Measures as a user would write them, for tests that name them by `_target_`."""

import torch
from torch import Tensor
from torchmetrics import MeanMetric, Metric


class Hits(Metric):
    """How often the target is among the `best` most probable ones."""

    higher_is_better = True
    title, explanation = "Best hits", "the share of targets among the best"
    hits: Tensor
    count: Tensor

    def __init__(self, best: int = 1) -> None:
        super().__init__()
        self.best = best
        self.add_state("hits", torch.tensor(0), dist_reduce_fx="sum")
        self.add_state("count", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, logits: Tensor, targets: Tensor) -> None:
        """logits [N, V], targets [N]"""
        self.hits += (logits.topk(self.best).indices == targets[:, None]).any(-1).sum()
        self.count += len(targets)

    def compute(self) -> Tensor:
        return self.hits / self.count


class MedianLogit(Metric):
    """The median of the logits of all targets, which no sum over ranks gives."""

    higher_is_better = True
    values: list[Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.add_state("values", [], dist_reduce_fx="cat")

    def update(self, logits: Tensor, targets: Tensor) -> None:
        """logits [N, V], targets [N]"""
        self.values.append(logits.gather(1, targets[:, None])[:, 0])

    def compute(self) -> Tensor:
        values = torch.cat(list(self.values)) if isinstance(self.values, list) else self.values
        return values.double().quantile(0.5)


class Apart(MedianLogit):
    """With torchmetrics' default for lists, by which each of their tensors is exchanged by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("values", [])


class Longest(Metric):
    """The widest stretch between the logits of a position."""

    higher_is_better = False
    widest: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("widest", torch.tensor(0.0), dist_reduce_fx="max")

    def update(self, logits: Tensor, targets: Tensor) -> None:
        """logits [N, V]"""
        self.widest = torch.maximum(self.widest, (logits.amax(-1) - logits.amin(-1)).max())

    def compute(self) -> Tensor:
        return self.widest


class Undecided(Hits):
    """One that does not say which of two values is better."""

    higher_is_better = None  # type: ignore[assignment]


class Pair(Hits):
    """One whose value is two numbers."""

    def compute(self) -> Tensor:
        return torch.stack([self.hits, self.count])


def hits_of_two() -> Hits:
    """A function that gives a Metric."""
    return Hits(2)


def no_metric() -> float:
    """A function that gives none."""
    return 1.0


class OfNone(Metric):
    """A mean over no positions."""

    higher_is_better = True

    def update(self, logits: Tensor, targets: Tensor) -> None:
        pass

    def compute(self) -> Tensor:
        return torch.tensor(0.0) / 0


class Near(MeanMetric):
    """How far the mean loss is from a number: the best evaluation is where a test wants it."""

    higher_is_better = False

    def __init__(self, center: float) -> None:
        super().__init__()
        self.center = center

    def update(self, logits: Tensor, targets: Tensor) -> None:  # type: ignore[override]
        super().update(torch.nn.functional.cross_entropy(logits, targets, reduction="none"))

    def compute(self) -> Tensor:
        return (super().compute() - self.center).abs()
