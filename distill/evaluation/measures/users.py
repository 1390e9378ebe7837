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
from distill.evaluation.measures.over_ranks import compute_metric, gather_exchange
from distill.runtime.errors import SettingError, first_line
from distill.runtime.users_code import MISTAKES, mistake, naming_mistakes

if TYPE_CHECKING:
    from torchmetrics import Metric

# Keys beside the measures, in a line of history and in a model's part of results.json.
TAKEN = {
    *("epoch", "step", "steps", "tokens", "seconds", "loss", "name", "parameters", "bytes", "tokens_per_second"),
    *("folder", "history", "objective", "cache", "perplexity", "pseudo_perplexity", "bits_per_byte", "bootstrap"),
    *("members", "origin", "start", "remarks", "learning_rate", "gap_closed"),
}
CURE = (
    "name a torchmetrics Metric, or a subclass of torchmetrics.Metric with update(logits, targets), compute() and "
    "higher_is_better"
)
TRIAL_POSITIONS = 2  # positions that every Metric is tried on

logger = logging.getLogger(__name__)


def check_measures(measures: dict[str, Component]) -> None:
    """Refuse a component that cannot be a measure, before there is a model to score.

    Raises:
        SettingError: a name that is taken or is no identifier, a target that cannot be imported or is no Metric, or
            arguments that it does not take.
    """
    for name, component in measures.items():
        if not name.isidentifier():
            raise SettingError(f"{component.setting}: the name of a measure has to be letters, digits and underscores")
        if name in TAKEN:
            raise SettingError(f"{component.setting}: results use the name {name} already; give the measure another")
        target, _ = component.bind()
        if inspect.isclass(target) and not _is_metric(target):
            raise SettingError(f"{component.setting}._target_={component.path} is no Metric: {CURE}")


def refuse_measures(measures: dict[str, Component], noun: str) -> None:
    """Raises SettingError for any measure, on sets of a kind whose outputs no Metric of logits and targets reads."""
    for component in measures.values():
        raise SettingError(
            f"{component.setting}._target_={component.path} reads logits and targets, which {noun} do not have: "
            "leave it out"
        )


class UserMeasures:
    """The user's Metrics, which read the same positions of a pass; each has been tried on a few positions."""

    def __init__(self, components: dict[str, Component], width: int, ranks: Ranks) -> None:
        """
        Args:
            width: V or C; 1 where values are predicted.

        Raises:
            SettingError: a component is no Metric, takes no logits [N, width] and targets [N], gives no single
                number, or does not declare whether a higher value is better.
        """
        self._metrics = {name: _BoundMetric(component, width, ranks) for name, component in components.items()}
        self.measures = tuple(
            Measure(name, *_words_of(name, bound.metric), lower_is_better=not bound.metric.higher_is_better)
            for name, bound in self._metrics.items()
        )

    def reset(self) -> None:
        """Reset all Metrics before the next set."""
        for bound in self._metrics.values():
            bound.metric.reset()

    def update(self, logits: Tensor, targets: Tensor) -> None:
        """Add the logits [N, V] and targets [N] of N positions."""
        for name, bound in self._metrics.items() if len(targets) else ():
            with naming_mistakes(f"evaluate.measures.{name}: update() of {type(bound.metric).__name__}", bound.metric):
                bound.update(logits, targets)

    def compute(self, set_name: str) -> dict[str, float]:
        """Values by name, over all ranks, which all call this; one that is no number is logged with the set's name."""
        values: dict[str, float] = {}
        for name, bound in self._metrics.items():
            with naming_mistakes(f"evaluate.measures.{name}: compute() of {type(bound.metric).__name__}", bound.metric):
                values[name] = float(compute_metric(bound.metric))
        for name, value in values.items():
            if not math.isfinite(value):
                logger.warning(f"evaluate.measures.{name}: it gives {value} on {set_name}, so there is no score of it")
        return values


class _BoundMetric:
    """A Metric and the shape in which it takes its inputs: some of text take [1, N, V] and [1, N]."""

    def __init__(self, component: Component, width: int, ranks: Ranks) -> None:
        self.metric: Metric = _make_metric(component).to(ranks.device)
        exchange = gather_exchange(ranks)
        for part in self.metric.modules():  # a Metric may consist of others
            if _is_metric(type(part)):
                _exchange_by(part, **exchange)
        problems = [self._problem(width, as_row) for as_row in (False, True)]
        if None not in problems:
            raise SettingError(
                f"{component.setting}._target_={component.path} does not fit logits [N, {width}] and targets [N] "
                f"({problems[0]}): give it arguments that do, or write a subclass of torchmetrics.Metric"
            )
        self.as_row = problems[0] is not None

    def update(self, logits: Tensor, targets: Tensor) -> None:
        self._update(logits, targets, self.as_row)

    def _update(self, logits: Tensor, targets: Tensor, as_row: bool) -> None:
        logits = logits.float()
        logits = logits.squeeze(-1) if logits.shape[-1] == 1 else logits
        self.metric.update(logits[None] if as_row else logits, targets[None] if as_row else targets)

    def _problem(self, width: int, as_row: bool) -> str | None:
        """The reason why the Metric refuses a few positions in this shape, or None. All ranks call it."""
        logits = torch.zeros(TRIAL_POSITIONS, width, device=self.metric.device)
        targets = torch.zeros(
            TRIAL_POSITIONS, dtype=torch.float32 if width == 1 else torch.int64, device=self.metric.device
        )
        self.metric.reset()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)
                self._update(logits, targets, as_row)
            count = torch.as_tensor(compute_metric(self.metric)).numel()
        except MISTAKES as error:
            return mistake(error)
        except RuntimeError as error:
            return first_line(error)
        finally:
            self.metric.reset()
        return None if count == 1 else f"its value is {count} numbers"


def _make_metric(component: Component) -> "Metric":
    metric = component()
    if not _is_metric(type(metric)):
        raise SettingError(f"{component.setting}._target_={component.path} gives no Metric: {CURE}")
    if metric.higher_is_better is None:
        raise SettingError(
            f"{component.setting}._target_={component.path} does not declare which of two values is better: set "
            "higher_is_better in a subclass"
        )
    return metric


def _exchange_by(metric: Any, dist_sync_fn: Any, distributed_available_fn: Any) -> None:
    """Set on a Metric what its base class takes in the constructor, as subclasses need not pass it on."""
    metric.dist_sync_fn, metric.distributed_available_fn = dist_sync_fn, distributed_available_fn


def _is_metric(kind: Any) -> bool:
    from torchmetrics import Metric

    return isinstance(kind, type) and issubclass(kind, Metric)


def _words_of(name: str, metric: "Metric") -> tuple[str, str]:
    """Title and explanation, which a class of the user's may give as attributes of these names."""
    title = name[:1].upper() + name[1:].replace("_", " ")
    explanation = f"{type(metric).__name__} at the same positions"
    return str(getattr(metric, "title", title)), str(getattr(metric, "explanation", explanation))
