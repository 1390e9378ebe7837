"""Classes, functions and objects of a program as what `_target_` names: losses, metrics and other parts."""

import copy
import importlib
import inspect
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

from distill.config.in_memory import InMemory
from distill.objective.terms import ALL, VocabularyTerm
from distill.runtime.errors import SettingError, first_line
from distill.runtime.users_source import source_digest

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
    if place.startswith(OBSERVERS) and not inspect.isclass(value):
        # It has no digest: what it has seen changes while it runs, and no student depends on it.
        return InMemory(name, "", lambda: value)
    if is_function and place.startswith((LOSSES, METRICS)):
        make: Callable[..., Any] = _LossOf(place, value) if place.startswith(LOSSES) else partial(_metric, value)
        return InMemory(name, digest_of(value, place), make, code=_code_behind(value))
    if inspect.isclass(value) or is_function:
        return import_path(value) or InMemory(name, digest_of(value, place), value, code=_code_behind(value))
    return InMemory(name, digest_of(value, place), lambda: copy.deepcopy(value), code=_code_behind(type(value)))


def digest_of(value: Any, place: str) -> str:
    """A digest of a function with all that it reads, of a class, or of an object with its values; of what can be
    imported by its name alone. It is the same in another process.

    Raises:
        SettingError: `place` holds what has no content that could be compared, such as an open file.
    """
    from datasets.fingerprint import Hasher

    try:
        return Hasher.hash(value)
    except Exception as error:  # of whatever kind an object raises that cannot be pickled
        problem = f"a resumed run could not compare what it holds ({first_line(error)})"
        cure = "give its class, and beside it as settings what makes the object"
        raise SettingError(problem, setting=place, value=type(value).__name__, cure=cure) from error


def _code_behind(value: Any) -> str | None:
    """A digest of the user's modules that define a class or function, or that a function of a notebook reads."""
    value = value.func if isinstance(value, partial) else value
    if path := import_path(value):
        return source_digest(path)
    read = inspect.getclosurevars(value).globals.values() if inspect.isfunction(value) else ()
    paths = {f"{one.__name__}." if inspect.ismodule(one) else import_path(one) or "" for one in read}
    return " ".join(sorted(filter(None, map(source_digest, paths)))) or None


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
