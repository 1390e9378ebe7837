"""The arguments of the commands: NAME=VALUE for all of them, into a pydantic model whose fields are the names."""

from itertools import islice
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args, get_origin

from pydantic import AfterValidator, BaseModel, ConfigDict, PlainValidator

from distill.config.errors import parse as validated
from distill.runtime.errors import SettingError, did_you_mean
from distill.runtime.files import expanded

Text = Annotated[str, PlainValidator(str)]  # taken as it stands: a text may be empty, or begin with a bracket
LocalFile = Annotated[Path, AfterValidator(lambda path: Path(expanded(str(path))))]
Values = TypeVar("Values", bound="Arguments")


class Arguments(BaseModel):
    """What a command takes. A list gets the values of a name that is given again and again, or as [A,B]."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


def parse(model: type[Values], arguments: list[str], command: str, besides: type["Arguments"] | None = None) -> Values:
    """A command line as `model`. Raises SettingError for names that it does not have, and for values that cannot be.

    Args:
        command: the name of the command, for the messages.
        besides: a model whose names the command has taken already, for the messages.
    """
    values, rest = split(model, arguments, command)
    if rest:
        name = rest[0].partition("=")[0]
        names = [field for part in (besides, model) if part is not None for field in part.model_fields]
        raise SettingError(
            f"{name} is not an argument of `distill {command}`{did_you_mean(name, names)}: it takes {', '.join(names)}"
        )
    return values


def split(model: type[Values], arguments: list[str], command: str) -> tuple[Values, list[str]]:
    """The same of a command that takes settings of a run too, which are the second part."""
    values, rest = dict[str, Any](), list[str]()
    left = iter(arguments)
    for argument in left:
        name, separator, value = argument.partition("=")
        field = model.model_fields.get(name)
        if argument.startswith("-") and _takes_value(argument):
            rest += [argument, *islice(left, 1)]
        elif not separator and not argument.startswith(("-", "~")):
            first = next(iter(model.model_fields))
            raise SettingError(f"{argument}: `distill {command}` takes NAME=VALUE, such as {first}={argument}")
        elif field is None:
            rest.append(argument)
        elif get_origin(field.annotation) is list:
            values.setdefault(name, []).extend(_listed(name, value, get_args(field.annotation)[0]))
        elif name in values:
            raise SettingError(f"{name} is given twice ({name}={values[name]} and {name}={value}): give it once")
        else:
            values[name] = _value(name, value, field.annotation)
    for name, field in model.model_fields.items():
        if field.is_required() and name not in values:
            raise SettingError(f"{name} is missing: give {name}=VALUE; `distill {command} --help` lists all arguments")
    return validated(model, values, ""), rest


def _takes_value(option: str) -> bool:
    from distill.config.command_line import SHORT, WITH_VALUE

    return SHORT.get(option, option) in WITH_VALUE


def _listed(name: str, value: str, kind: Any) -> list[str]:
    """The value, or those of a list as Hydra writes it."""
    if kind is Text or not (value.startswith("[") and value.endswith("]")):
        return [_value(name, value, kind)]
    from distill.config.command_line import read_list

    return read_list(name, value)


def _value(name: str, value: str, kind: Any) -> str:
    """The value. Raises SettingError for an empty one that is no text."""
    if not value and Text not in (kind, *get_args(kind)):
        raise SettingError(f"{name}= is empty (a shell variable that is not set?): give it a value, or leave it out")
    return value
