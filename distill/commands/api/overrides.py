"""Settings as keyword arguments of a program, made the overrides of a command line and the objects beside them."""

import re
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

from distill.commands.api.callables import LOSSES, METRICS, OBSERVERS, target_of
from distill.config.command_line import groups, options_of
from distill.config.in_memory import InMemory
from distill.config.layers import REPLACED
from distill.config.model import Settings
from distill.config.override_text import quoted
from distill.config.settings import ObjectiveFlags
from distill.runtime.errors import SettingError

PLAIN = re.compile(r"[A-Za-z_./][A-Za-z0-9_./-]*")  # texts that Hydra reads as texts without quotation marks
OTHER_WORDS = ("null", "true", "false", "inf", "nan")
FLAGS = (*ObjectiveFlags.model_fields, "temperature")  # settings of the objective that are no terms
CALLED = ("optimizer", "schedule")  # groups in whose place a class or function may stand
CHOOSERS = {"student": "init", "teacher": "kind"}  # what chooses one of the classes of a section


class Overrides:
    """The overrides of a command line as they are put together, and the objects that some of them stand for."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.objects: dict[str, InMemory] = {}

    def add(self, name: str, value: Any) -> None:
        """A setting by its dotted name, or several as a mapping or as one of the models of settings.

        Raises:
            SettingError: a value that no setting has.
        """
        if isinstance(value, Settings):
            value = _given_fields(name, value)
        if name == OBSERVERS.rstrip(".") and not isinstance(value, Mapping | None):
            raise SettingError(
                f"observers is a {type(value).__name__}: give each a name, as observers={{'mine': OBSERVER}}"
            )
        if _is_weight(name, value):
            name += ".weight"
        if _stands_for_target(name, value):
            self._add_target(name.removesuffix("._target_"), value)
        elif isinstance(value, Mapping) and name not in REPLACED and set(value) != {"start", "end"}:
            _refuse_names(name, value)
            for key, inner in sorted(value.items(), key=lambda item: item[0] != "_target_"):
                self.add(f"{name}.{key}", inner)
        elif isinstance(value, str) and name in groups() and value in options_of(name):
            self.texts.append(f"{name}={value}")
        else:
            self.texts.append(f"{self._sign(name)}{name}={literal(value, name)}")

    def add_object(self, name: str, value: InMemory, **beside: Any) -> None:
        """An object in place of the import path `NAME._target_`, and settings beside it."""
        self.texts.append(f"++{name}._target_={literal(str(value), name)}")
        self.objects[f"{name}._target_"] = value
        self.texts += [f"++{name}.{key}={literal(inner, name)}" for key, inner in beside.items()]

    def _add_target(self, name: str, value: Any) -> None:
        if name in CALLED:
            self.texts.append(f"{name}=custom")
        target = target_of(name, value)
        if isinstance(target, InMemory):
            self.add_object(name, target)
        else:
            self.texts.append(f"++{name}._target_={literal(target, name)}")

    def _sign(self, name: str) -> str:
        """What lets a name through that the settings do not have: beside a callable any may be one of its arguments."""
        beside = f"{name.rpartition('.')[0]}._target_="
        return "++" if any(text.lstrip("+").startswith(beside) for text in self.texts) else ""


def _stands_for_target(name: str, value: Any) -> bool:
    if name.endswith("._target_"):
        return callable(value)
    group, _, last = name.rpartition(".")
    is_place = name in CALLED or (bool(last) and f"{group}." in (LOSSES, METRICS, OBSERVERS))
    is_value = value is None or isinstance(value, str | int | float | Mapping | Settings | list | tuple)
    return is_place and not is_value


def _is_weight(name: str, value: Any) -> bool:
    """Whether a value that stands for a whole loss term is its weight."""
    is_term = name.startswith(LOSSES) and name.count(".") == 1 and name.removeprefix(LOSSES) not in FLAGS
    return is_term and (
        isinstance(value, int | float) or (isinstance(value, Mapping) and set(value) == {"start", "end"})
    )


def _given_fields(name: str, settings: Settings) -> Mapping[str, Any]:
    """The fields that were given, without the defaults; and the field that chooses this class of a section."""
    fields = {key: getattr(settings, key) for key in settings.model_fields_set}
    chooser = CHOOSERS.get(name)
    return fields if chooser is None else {chooser: getattr(settings, chooser), **fields}


def _refuse_names(name: str, values: Mapping[Any, Any]) -> None:
    for key in values:
        if not isinstance(key, str):
            raise SettingError(f"{name} has the key {key!r}, which is no text: give the name of a setting")


def literal(value: Any, name: str) -> str:
    """A value as Hydra reads it on a command line. Raises SettingError for an object that no setting has."""
    if callable(getattr(value, "item", None)) and getattr(value, "size", None) == 1:  # a number of numpy
        return literal(value.item(), name)
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case int() | float():
            return repr(value)
        case Enum():
            return literal(value.value, name)
        case str() | Path():
            return _text(str(value))
        case Settings():
            return literal({key: getattr(value, key) for key in value.model_fields_set}, name)
        case Mapping():
            return "{" + ",".join(f"{_key(key)}:{literal(inner, name)}" for key, inner in value.items()) + "}"
        case list() | tuple() | range() | set():
            return "[" + ",".join(literal(inner, name) for inner in value) + "]"
    raise SettingError(
        f"{name} is a {type(value).__name__}: settings are numbers, texts, lists and mappings; models are given as "
        "teacher= and student=, texts as data= and evaluation="
    )


def _key(key: Any) -> str:
    return key if isinstance(key, str) and re.fullmatch(r"\w+", key) else _text(str(key))


def _text(text: str) -> str:
    if PLAIN.fullmatch(text) and text.lower() not in OTHER_WORDS:
        return text
    return quoted(text)
