"""The arguments of the commands: NAME=VALUE for all of them, into a dataclass whose fields are the names."""

import types
from dataclasses import MISSING, fields
from itertools import islice
from pathlib import Path
from typing import Any, NewType, TypeVar, Union, get_args, get_origin, get_type_hints

from distill.runtime.errors import SettingError, did_you_mean
from distill.runtime.files import expanded

Text = NewType("Text", str)  # taken as it stands: a text may be empty, or begin with a bracket
WANTED = {bool: "true or false", int: "a whole number", float: "a number"}
Arguments = TypeVar("Arguments")


def parse(cls: type[Arguments], arguments: list[str], command: str, besides: type | None = None) -> Arguments:
    """A command line as `cls`. Raises SettingError for names that it does not have, and for values that cannot be.

    Args:
        cls: a dataclass. A list gets the values of a name that is given again and again, or as [A,B].
        command: the name of the command, for the messages.
        besides: a dataclass whose names the command has taken already, for the messages.
    """
    values, rest = split(cls, arguments, command)
    if rest:
        name = rest[0].partition("=")[0]
        names = [field.name for part in (besides, cls) if part is not None for field in fields(part)]
        raise SettingError(
            f"{name} is not an argument of `distill {command}`{did_you_mean(name, names)}: it takes {', '.join(names)}"
        )
    return values


def split(cls: type[Arguments], arguments: list[str], command: str) -> tuple[Arguments, list[str]]:
    """The same of a command that takes settings of a run too, which are the second part."""
    kinds, values, rest = get_type_hints(cls), dict[str, Any](), list[str]()
    left = iter(arguments)
    for argument in left:
        name, separator, value = argument.partition("=")
        if argument.startswith("-") and _takes_value(argument):
            rest += [argument, *islice(left, 1)]
            continue
        if not separator and not argument.startswith(("-", "~")):
            first = fields(cls)[0].name  # type: ignore[arg-type]
            raise SettingError(f"{argument}: `distill {command}` takes NAME=VALUE, such as {first}={argument}")
        if name not in kinds:
            rest.append(argument)
        elif get_origin(kinds[name]) is list:
            values.setdefault(name, []).extend(_listed(name, value, get_args(kinds[name])[0]))
        elif name in values:
            raise SettingError(f"{name} is given twice ({name}={values[name]} and {name}={value}): give it once")
        else:
            values[name] = _value(name, value, _plain(kinds[name]))
    for field in fields(cls):  # type: ignore[arg-type]
        if field.name not in values and field.default is MISSING and field.default_factory is MISSING:
            raise SettingError(
                f"{field.name} is missing: give {field.name}=VALUE; `distill {command} --help` lists all arguments"
            )
    return cls(**values), rest


def _takes_value(option: str) -> bool:
    from distill.config.command_line import SHORT, WITH_VALUE

    return SHORT.get(option, option) in WITH_VALUE


def _plain(kind: Any) -> Any:
    """X of X | None."""
    if get_origin(kind) in (types.UnionType, Union):
        return next(part for part in get_args(kind) if part is not type(None))
    return kind


def _listed(name: str, value: str, kind: Any) -> list[Any]:
    """The value, or those of a list as Hydra writes it."""
    if kind is Text or not (value.startswith("[") and value.endswith("]")):
        return [_value(name, value, kind)]
    from distill.config.command_line import read_list

    return [_value(name, entry, kind) for entry in read_list(name, value)]


def _value(name: str, value: str, kind: Any) -> Any:
    if kind is Text:
        return value
    if not value:
        raise SettingError(f"{name}= is empty (a shell variable that is not set?): give it a value, or leave it out")
    if kind in (Path, str):
        return kind(expanded(value))
    try:
        return {"true": True, "false": False}[value.lower()] if kind is bool else kind(value)
    except (KeyError, ValueError):
        raise SettingError(f"{name}={value[:80]}: give {WANTED[kind]}") from None
