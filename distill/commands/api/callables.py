"""Classes, functions and objects of a program as what `_target_` names: losses, metrics and other parts."""

import copy
import importlib
import inspect
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

from distill.commands.api.digest import code_digest, digest_of
from distill.config.in_memory import InMemory
from distill.objective.terms import ALL, VocabularyTerm
from distill.runtime.errors import SettingError
from distill.runtime.users_code import source_digest

if TYPE_CHECKING:
    from torchmetrics import Metric

LOSSES, METRICS, OBSERVERS = "objective.", "evaluate.measures.", "observers."


class FunctionLoss(VocabularyTerm):
    """A loss over the vocabulary by a function of student logits [n, V], teacher logits [n, V] and targets [n]."""

    def __init__(self, function: Callable[..., Tensor], positions: str) -> None:
        self.function, self.positions = function, positions

    def losses(self, student: Tensor, teacher: Any, targets: Tensor) -> Tensor:
        return self.function(student, teacher, targets)


def target_of(place: str, value: Any) -> str | InMemory:
    """What `_target_` of a setting is for a class, a function or an object: an import path where there is one.

    A class is made with the settings beside it. A function of `objective.NAME` is the loss itself, one of
    `evaluate.measures.NAME` gives a value for each position, and any other object stands for itself, as a copy but
    for observers, from which a program may read afterwards what they have seen.

    Args:
        place: the name of the setting, such as `objective.my_loss`.
    """
    name = getattr(value, "__name__", type(value).__name__)
    is_function = inspect.isroutine(value) or isinstance(value, partial)
    path = import_path(value) if inspect.isclass(value) or is_function else None
    code = code_digest(value) if is_function and path is None else source_digest(path or import_path(type(value)) or "")
    if is_function and place.startswith(LOSSES):
        return InMemory(name, digest_of(value), _LossOf(place, value), code=code)
    if is_function and place.startswith(METRICS):
        return InMemory(name, digest_of(value), partial(_metric, value), code=code)
    if place.startswith(OBSERVERS) and not inspect.isclass(value):
        # What it has seen may be long, and no run depends on it.
        return InMemory(name, digest_of(value if is_function else type(value)), lambda: value)
    if inspect.isclass(value) or is_function:
        return path or InMemory(name, digest_of(value), value, code=code)
    return InMemory(name, digest_of(value), lambda: copy.deepcopy(value), code=code)


def import_path(value: Any) -> str | None:
    """The path by which another process finds a class or function; None for one of a notebook, say."""
    module, name = str(getattr(value, "__module__", "")), str(getattr(value, "__qualname__", ""))
    try:
        is_there = module != "__main__" and getattr(importlib.import_module(module), name) is value
    except (ImportError, AttributeError, ValueError):
        return None
    return f"{module}.{name}" if is_there else None


class _LossOf:
    """Makes the loss of a function; its settings are the function's arguments behind the first three."""

    def __init__(self, place: str, function: Callable[..., Tensor]) -> None:
        parameters = list(inspect.signature(function).parameters.values())
        if len(parameters) < 3:
            raise SettingError(
                f"{place}: a function as a loss takes logits of the student, logits of the teacher and targets, and "
                f"{getattr(function, '__name__', function)} takes {len(parameters)} arguments: give it three"
            )
        self.function, self._more = function, parameters[3:]

    @property
    def __signature__(self) -> inspect.Signature:
        positions = inspect.Parameter("positions", inspect.Parameter.KEYWORD_ONLY, default=ALL, annotation=str)
        more = [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in self._more if one.name != "positions"]
        return inspect.Signature([*more, positions])

    def __call__(self, positions: str = ALL, **settings: Any) -> FunctionLoss:
        return FunctionLoss(partial(self.function, **settings), positions)


def _metric(function: Callable[[Tensor, Tensor], Tensor], higher_is_better: bool) -> "Metric":
    """The mean of what a function of logits [N, V] and targets [N] gives, over all positions."""
    from torchmetrics import MeanMetric

    better = higher_is_better

    class FunctionMean(MeanMetric):
        higher_is_better = better  # type: ignore[assignment]
        explanation = f"the mean of {getattr(function, '__name__', 'a function')} over the same positions"

        def update(self, logits: Tensor, targets: Tensor) -> None:  # type: ignore[override]
            super().update(function(logits, targets))

    return FunctionMean()
