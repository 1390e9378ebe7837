"""The arguments of the commands, NAME=VALUE for all of them: a pydantic model for each, and the help made from it."""

import inspect
import textwrap
from collections.abc import Callable, Mapping
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple, TypeVar, get_args, get_origin

from pydantic import AfterValidator, BaseModel, ConfigDict, PlainValidator

from distill.config.command_line import SHORT, WITH_VALUE, read_list
from distill.config.errors import parse as validated
from distill.runtime.errors import SettingError, did_you_mean
from distill.runtime.files import expanded

Text = Annotated[str, PlainValidator(str)]  # taken as it stands: a text may be empty, or begin with a bracket
LocalFile = Annotated[Path, AfterValidator(lambda path: Path(expanded(str(path))))]
WIDTH = 118  # characters of a line of help


class Arguments(BaseModel):
    """What a command takes. A list gets the values of a name that is given again and again, or as [A,B].

    The docstring of a subclass is the help of its command: what it does and, behind that, examples. A field has the
    help of an argument as its `description`, and as `title` the word that stands for its value.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
    settings: ClassVar[str] = ""  # which settings of a run the command takes besides; empty: none


Values = TypeVar("Values", bound=Arguments)


class Command(NamedTuple):
    """A command as `cli.COMMANDS` names it; a module with these two names is one as well."""

    HELP: str
    run: Callable[[list[str]], int | None]  # None: exit status 0


def parse(model: type[Values], arguments: list[str], command: str, besides: type[Arguments] | None = None) -> Values:
    """A command line as `model`. Raises SettingError for names that it does not have, and for values that cannot be.

    Args:
        command: the name of the command, for the messages.
        besides: a model whose names the command has taken already, for the messages.
    """
    values, rest = split(model, arguments, command)
    if rest:
        name = rest[0].partition("=")[0]
        names = [field for part in (besides, model) if part is not None for field in part.model_fields]
        problem = f"is not an argument of `distill {command}`{did_you_mean(name, names)}: it takes {', '.join(names)}"
        raise SettingError(f"{name} {problem}")
    return values


def split(model: type[Values], arguments: list[str], command: str) -> tuple[Values, list[str]]:
    """The same of a command that takes settings of a run too, which are the second part."""
    values, rest = dict[str, Any](), list[str]()
    left = iter(arguments)
    for argument in left:
        name, separator, value = argument.partition("=")
        field = model.model_fields.get(name)
        if argument.startswith("-"):
            rest += [argument, *islice(left, int(SHORT.get(argument, argument) in WITH_VALUE))]
        elif not separator and not argument.startswith("~"):
            first = next(iter(model.model_fields))
            raise SettingError(f"{argument}: `distill {command}` takes NAME=VALUE, such as {first}={argument}")
        elif field is None:
            rest.append(argument)
        elif not value and Text not in (field.annotation, *get_args(field.annotation)):
            raise SettingError(
                f"{name}= is empty (a shell variable that is not set?): give it a value, or leave it out"
            )
        elif get_origin(field.annotation) is list:
            is_list = value.startswith("[") and value.endswith("]") and get_args(field.annotation) != (Text,)
            values.setdefault(name, []).extend(read_list(name, value) if is_list else [value])
        elif name in values:
            raise SettingError(f"{name} is given twice ({name}={values[name]} and {name}={value}): give it once")
        else:
            values[name] = value
    return validated(model, values, ""), rest


def help_of(model: type[Arguments], command: str) -> str:
    """What `distill COMMAND --help` prints."""
    usage, rows = [f"usage: distill {command}"], dict[str, str]()
    for name, field in model.model_fields.items():
        word = f"{name}={'true' if field.annotation is bool else field.title or 'VALUE'}"
        usage.append(word if field.is_required() else f"[{word}]")
        if get_origin(field.annotation) is list:
            usage.append(f"[{word} ...]")
        has_default = not field.is_required() and field.default not in (None, False) and field.default_factory is None
        rows[word] = f"{field.description}{f' (default: {field.default})' if has_default else ''}"
    if model.settings:
        usage += ["[+recipe=NAME]", "[SETTING=VALUE ...]"]
        rows["SETTING=VALUE"] = model.settings
    head, begin, examples = inspect.cleandoc(model.__doc__ or "").partition("\n\n  distill ")
    first = textwrap.fill(" ".join(usage), WIDTH, subsequent_indent=" " * len("usage: "), break_on_hyphens=False)
    return "\n\n".join([first, head, table(rows)]) + begin + examples


def table(rows: Mapping[str, str]) -> str:
    """What the names of these rows mean, in two columns."""
    column = max(map(len, rows)) + 4
    return "\n".join(
        textwrap.fill(text, WIDTH, initial_indent=f"  {name}".ljust(column), subsequent_indent=" " * column)
        for name, text in rows.items()
    )
