"""Measures of the user's: any torchmetrics Metric of logits and targets that `evaluate.measures` names.

Shapes: N positions of a batch, V vocabulary or C classes.
"""

import inspect
import logging
import math
import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from distill.config.component import Component
from distill.distributed import Ranks
from distill.evaluation.measures import Measure
from distill.runtime.errors import SettingError, first_line
from distill.runtime.users_code import MISTAKES, mistake, naming_mistakes

if TYPE_CHECKING:
    from torchmetrics import Metric

# Keys beside the measures, in a line of history and in a model's part of results.json.
TAKEN = {
    *("epoch", "step", "steps", "tokens", "seconds", "loss", "name", "parameters", "bytes", "tokens_per_second"),
    *("folder", "history", "objective", "cache", "perplexity", "pseudo_perplexity", "bits_per_byte", "bootstrap"),
    *("members", "origin", "start", "published", "remarks", "learning_rate", "sequences_per_step", "gap_closed"),
    *("conclusions", "same_limits", "started_from", "top1", "kl"),
}
CURE = (
    "name a torchmetrics Metric, or a subclass of torchmetrics.Metric with update(logits, targets), compute() and "
    "higher_is_better"
)
NARROW = (torch.bool, torch.uint8, torch.int8, torch.int16)  # types that not every communication library sums

logger = logging.getLogger(__name__)


def check_measures(measures: dict[str, Component]) -> None:
    """Refuse a component that cannot be a measure, before there is a model to score."""
    for name, component in measures.items():
        if not name.isidentifier():
            raise SettingError(f"{component.setting}: the name of a measure has to be letters, digits and underscores")
        if name in TAKEN:
            raise SettingError(f"{component.setting}: results use the name {name} already; give the measure another")
        target, _ = component.bind()
        if inspect.isclass(target) and not _is_metric(target):
            raise SettingError(f"{component.setting}._target_={component.path} is no Metric: {CURE}")


class UserMeasures:
    """The user's Metrics, which read the same positions of a pass; each has been tried on a few positions."""

    def __init__(self, components: dict[str, Component], width: int, ranks: Ranks) -> None:
        """
        Args:
            width: V or C; 1 where values are predicted.
        """
        self._metrics = {name: _make_metric(component, ranks) for name, component in components.items()}
        for name, component in components.items():
            if problem := self._problem(name, width):
                raise SettingError(
                    f"{component.setting}._target_={component.path} does not fit logits [N, {width}] and targets [N] "
                    f"({problem}): give it arguments that do, or write a subclass of torchmetrics.Metric"
                )
        self.measures = tuple(_measure_of(name, metric) for name, metric in self._metrics.items())

    def reset(self) -> None:
        """Reset all Metrics before the next set."""
        for metric in self._metrics.values():
            metric.reset()

    def update(self, logits: Tensor, targets: Tensor) -> None:
        """Add the logits [N, V] and targets [N] of N positions."""
        for name, metric in self._metrics.items() if len(targets) else ():
            with naming_mistakes(f"evaluate.measures.{name}: update() of {type(metric).__name__}", metric):
                _update(metric, logits, targets)

    def compute(self, set_name: str) -> dict[str, float]:
        """Values by name, over all ranks, which all call this; one that is no number is logged with the set's name."""
        values: dict[str, float] = {}
        for name, metric in self._metrics.items():
            with naming_mistakes(f"evaluate.measures.{name}: compute() of {type(metric).__name__}", metric):
                values[name] = float(_compute(metric))
            if not math.isfinite(values[name]):
                value = values[name]
                logger.warning(f"evaluate.measures.{name}: it gives {value} on {set_name}, so there is no score of it")
        return values

    def _problem(self, name: str, width: int) -> str:
        """The reason why a Metric refuses two positions, or nothing. All ranks call it."""
        metric = self._metrics[name]
        dtype = torch.float32 if width == 1 else torch.int64
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)
                _update(metric, torch.zeros(2, width), torch.zeros(2, dtype=dtype))
            count = torch.as_tensor(_compute(metric)).numel()
        except MISTAKES as error:
            return mistake(error)
        except RuntimeError as error:
            return first_line(error)
        finally:
            metric.reset()
        return "" if count == 1 else f"its value is {count} numbers"


def _make_metric(component: Component, ranks: Ranks) -> "Metric":
    """The Metric of a component, which exchanges its states by these ranks."""
    from torchmetrics.utilities import dim_zero_cat

    metric = component()
    if not _is_metric(type(metric)):
        raise SettingError(f"{component.setting}._target_={component.path} gives no Metric: {CURE}")
    if metric.higher_is_better is None:
        raise SettingError(
            f"{component.setting}._target_={component.path} does not declare which of two values is better: set "
            "higher_is_better in a subclass"
        )
    for part in metric.modules():  # a Metric may consist of others
        if _is_metric(type(part)):
            kept = {name for name, default in part._defaults.items() if isinstance(default, list)}
            if ranks.size > 1 and any(part._reductions[name] is not dim_zero_cat for name in kept):
                raise SettingError(
                    f"{component.setting}._target_={component.path} keeps {', '.join(kept)} as a list, of which ranks "
                    "have different numbers of tensors: declare it with dist_reduce_fx='cat'"
                )
            # What the base class takes in the constructor, which subclasses need not pass on.
            part.dist_sync_fn = lambda state, group=None: gather(state, ranks)
            part.distributed_available_fn = lambda: ranks.size > 1
    return metric.to(ranks.device)


def gather(state: Tensor, ranks: Ranks) -> list[Tensor]:
    """This tensor of every rank. Those without an element may have another shape and type; they take the others'."""
    states = ranks.gather([list(state.shape), str(state.dtype).removeprefix("torch.")])
    usual, name = next((each for each in states if 0 not in each[0]), states[0])
    dtype = getattr(torch, name)
    shapes = [shape if len(shape) == len(usual) else [0, *usual[1:]] for shape, _ in states]
    counts = [torch.Size(shape).numel() for shape in shapes]
    # Every rank fills in its own part of zeros, and adding zeros changes nothing.
    table = torch.zeros(sum(counts), dtype=torch.int32 if dtype in NARROW else dtype, device=state.device)
    if state.numel():
        start = sum(counts[: ranks.rank])
        table[start : start + state.numel()] = state.reshape(-1)
    parts = ranks.sum(table).to(dtype).split(counts)
    return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]


def _update(metric: "Metric", logits: Tensor, targets: Tensor) -> None:
    """Of one output, which is a value, a Metric gets predictions [N]."""
    logits = logits.squeeze(-1) if logits.shape[-1] == 1 else logits
    metric.update(logits.float().to(metric.device), targets.to(metric.device))


def _compute(metric: "Metric") -> Any:
    """The value over all ranks, which all call this; a rank may have updated no state."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return metric.compute()


def _is_metric(kind: Any) -> bool:
    from torchmetrics import Metric  # which takes a second to import, in runs with such measures alone

    return isinstance(kind, type) and issubclass(kind, Metric)


def _measure_of(name: str, metric: "Metric") -> Measure:
    """Title and explanation may be attributes of a class of the user's."""
    title = getattr(metric, "title", name[:1].upper() + name[1:].replace("_", " "))
    explanation = getattr(metric, "explanation", f"{type(metric).__name__} at the same positions")
    return Measure(name, str(title), str(explanation), lower_is_better=not metric.higher_is_better)
