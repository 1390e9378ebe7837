"""What a program gives for settings, as plain values; classes, functions and objects as what `_target_` names."""

import copy
import importlib
import inspect
from collections.abc import Callable, Mapping
from functools import partial
from io import BytesIO
from numbers import Number
from typing import TYPE_CHECKING, Any

from pydantic_core import to_jsonable_python
from torch import Tensor

from distill.config.base import Settings
from distill.config.command_line import groups
from distill.config.component import TARGET, InMemory
from distill.config.models import READ_BY
from distill.config.settings import ObjectiveConfig, StudentConfig
from distill.objective.terms import ALL, VocabularyTerm
from distill.runtime.errors import SettingError, first_line
from distill.runtime.users_code import source_digest

if TYPE_CHECKING:
    from torchmetrics import Metric

LOSSES, METRICS, OBSERVERS = "objective", "evaluate.measures", "observers"
FLAGS = tuple(ObjectiveConfig.model_fields)  # settings of the objective that are no terms
CALLED = ("optimizer", "schedule")  # groups in whose place a class or function may stand
SCHEDULE = {"start", "end"}  # the names of a number that follows a schedule


class CallSettings:
    """The settings of a call: options of groups, which name files, and values by dotted names."""

    def __init__(self) -> None:
        self.options: dict[str, str] = {}
        self.values: dict[str, Any] = {}

    def add(self, name: str, value: Any) -> None:
        """A setting by its dotted name, or several as a mapping or as one of the models of settings.

        Raises:
            SettingError: a value that no setting has.
        """
        if isinstance(value, Settings):
            init = {"init": value.init} if isinstance(value, StudentConfig) else {}
            value = init | value.model_dump(by_alias=True, exclude_unset=True)
        if name == "student" and isinstance(value, Mapping) and "init" in value:  # a recipe may set what that ignores
            unread = [field for field, readers in READ_BY.items() if value["init"] not in readers]
            value = {field: StudentConfig.model_fields[field].default for field in unread} | dict(value)
        place = name.removesuffix(f".{TARGET}")
        if (place != name and callable(value)) or _is_called(name, value):
            if place in CALLED:
                self.options[place] = "custom"
            self.values[f"{place}.{TARGET}"] = target_of(place, value)
        elif isinstance(value, Mapping) and {*value} != SCHEDULE:
            for key, inner in value.items():
                self.add(f"{name}.{key}", inner)
        elif isinstance(value, str) and name in groups():
            self.options[name] = value
        else:
            group, _, last = name.partition(".")
            is_term = group == LOSSES and "." not in last and last not in FLAGS
            self.values[f"{name}.weight" if is_term else name] = plain(value, name)


def _is_called(name: str, value: Any) -> bool:
    """Whether a class, a function or an object stands in place of a group of settings."""
    is_place = name in CALLED or name.rpartition(".")[0] in (LOSSES, METRICS, OBSERVERS)
    return is_place and not isinstance(value, str | Number | Mapping | list | tuple | None)


def plain(value: Any, name: str) -> Any:
    """A value of numbers, texts, lists and dicts. Raises SettingError for an object, which no setting has."""

    def without_type(other: Any) -> Any:
        if isinstance(other, range):
            return list(other)
        if callable(getattr(other, "item", None)) and getattr(other, "size", None) == 1:  # a number of numpy
            return other.item()
        raise SettingError(
            f"a {type(other).__name__}",
            setting=name,
            cure="settings are numbers, texts, lists and mappings; models are given as teacher= and student=, texts "
            "as data=, observers as observers={'mine': OBSERVER}",
        )

    return to_jsonable_python(value, fallback=without_type)


def target_of(place: str, value: Any) -> str | InMemory:
    """What `_target_` of a setting is for a class, a function or an object: an import path where there is one.

    A class is made with the settings beside it. A function of `objective.NAME` is the loss itself, one of
    `evaluate.measures.NAME` gives a value for each position, and any other object stands for itself, as a copy but
    for observers, from which a program may read afterwards what they have seen.

    Args:
        place: the name of the setting, such as `objective.my_loss`.
    """
    name, group = getattr(value, "__name__", type(value).__name__), place.rpartition(".")[0]
    is_function = inspect.isroutine(value) or isinstance(value, partial)
    if group == OBSERVERS and not inspect.isclass(value):
        # It has no digest: what it has seen changes while it runs, and no student depends on it.
        return InMemory(name, "", lambda: value)
    if is_function and group in (LOSSES, METRICS):
        make: Callable[..., Any] = partial(FunctionLoss if group == LOSSES else _metric, value)
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
        return Hasher.hash_bytes(_pickled(value))
    except Exception as error:  # of whatever kind an object raises that cannot be pickled
        problem = f"a resumed run could not compare what it holds ({first_line(error)})"
        cure = "give its class, and beside it as settings what makes the object"
        raise SettingError(problem, setting=place, value=type(value).__name__, cure=cure) from error


def _pickled(value: Any) -> bytes:
    """What datasets hashes, with frozen sets in one order: compiled code keeps what `in {...}` looks into as such."""
    from datasets.fingerprint import Hasher
    from datasets.utils._dill import Pickler

    class Ordered(Pickler):
        def save(self, obj: Any, save_persistent_id: bool = True) -> None:
            if type(obj) is frozenset and id(obj) not in self.memo:
                self.save_reduce(frozenset, (sorted(obj, key=Hasher.hash),), obj=obj)
            else:
                super().save(obj, save_persistent_id)

    file = BytesIO()
    Ordered(file, recurse=True).dump(value)
    return file.getvalue()


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


class FunctionLoss(VocabularyTerm):
    """A loss over the vocabulary by a function of student logits [n, V], teacher logits [n, V] and targets [n].

    `settings`: the function's arguments behind these three; one of them may be the temperature of the objective.
    """

    def __init__(
        self, function: Callable[..., Tensor], positions: str = ALL, temperature: float | None = None, **settings: Any
    ) -> None:
        signature = inspect.signature(function)
        if "temperature" in signature.parameters and temperature is not None:
            settings["temperature"] = temperature
        try:
            signature.bind(None, None, None, **settings)
        except TypeError as error:
            problem = (
                "a function as a loss takes logits of the student, logits of the teacher, targets and its settings"
            )
            raise ValueError(f"{problem} ({error})") from None
        self.function, self.positions = partial(function, **settings), positions

    def losses(self, student: Tensor, teacher: Any, targets: Tensor) -> Tensor:
        return self.function(student, teacher, targets)


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


def that_learns(model: Any) -> Any:
    """A student of which something is trained: all of it where all is frozen, as `load_model` does with any model."""
    is_frozen = not any(parameter.requires_grad for parameter in model.parameters())
    return model.requires_grad_() if is_frozen else model
