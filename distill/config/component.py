"""Objects that settings name: a built-in one by `kind`, which is a file of the package, a user's own by `_target_`.

`_target_` is Hydra's word for the import path of a callable. The settings beside it are its keyword arguments; the
callable's signature is their schema, types included. Such a kind is no union of classes, as student and teacher are
(`distill.config.unions`): that would be a second list of the files.
"""

import importlib
import inspect
import math
import pkgutil
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, get_type_hints

from pydantic.json_schema import SkipJsonSchema

from distill.config.in_memory import IN_MEMORY, InMemory, refuse_text_of_object
from distill.config.model import EMPTY, GIVE
from distill.config.synonyms import suggestion
from distill.runtime.errors import SettingError, did_you_mean
from distill.runtime.files import expanded
from distill.runtime.users_code import MISTAKES, find_modules_here, is_users, mistake, source_digest

# The packages that hold what settings name by `kind`.
SOURCES = "distill.data.sources"
TABLES = "distill.data.tables"
TERMS = "distill.objective.terms"
OPTIMIZERS = "distill.optim.optimizers"
SCHEDULES = "distill.optim.schedules"

# How a ValueError begins that names an argument, `warmup=2 must be below 1`: the name, the value and the rest.
ARGUMENT = re.compile(r"(\w+)(?:=(\[.*\]|\(.*\)|\{.*\}|[^\s,]+?))?:? (.*)", re.DOTALL)
LARGEST = 1e12  # of numbers that have no range of their own, such as those of a callable of the user's


@dataclass(frozen=True)
class Component:
    """A callable by its import path, and the settings to call it with."""

    setting: str  # what error lines call it, such as objective.soft
    path: str  # package.module.Name
    arguments: dict[str, Any] = field(default_factory=dict)
    # Settings of the whole group, or of another component: passed on where they have a value and are taken.
    optional: tuple[str, ...] = field(default=(), compare=False)
    in_memory: SkipJsonSchema[InMemory | None] = None  # in place of what `path` imports

    def __call__(self, **context: Any) -> Any:
        """Call it with the settings and those values of `context` that its signature takes.

        Raises:
            SettingError: it cannot be imported, the settings do not fit its signature, it refuses their values with a
                ValueError, or it is the user's and fails.
        """
        target, arguments = self.bind(**context)
        try:
            return target(**arguments)
        except ValueError as error:
            if isinstance(error, SettingError):
                raise
            begin = ARGUMENT.match(str(error))
            if begin is None or begin[1] not in inspect.signature(target).parameters:
                raise SettingError(error, setting=self.setting) from error
            problem, _, cure = begin[3].removeprefix("is ").rpartition(": ")
            problem = problem or "out of range"
            raise SettingError(problem, setting=f"{self.setting}.{begin[1]}", value=begin[2], cure=cure) from error
        except MISTAKES as error:
            if not is_users(self.path):
                raise
            raise SettingError(mistake(error), setting=f"{self.setting}._target_", value=self.path) from error

    def bind(self, **context: Any) -> tuple[Callable[..., Any], dict[str, Any]]:
        """What a call would call, and with which arguments; SettingError as there, but for values it refuses."""
        target = self._import()
        try:
            parameters = inspect.signature(target).parameters
        except ValueError as error:
            raise SettingError(
                "does not say what it takes",
                setting=f"{self.setting}._target_",
                value=self.path,
                cure="wrap it in a function of your own",
            ) from error
        bound = {name: value for name, value in context.items() if name in parameters or _takes_all(parameters)}
        return target, {**bound, **self._typed(target, parameters, set(bound))}

    def takes(self) -> set[str]:
        """The names that the callable's signature has."""
        return set(inspect.signature(self._import()).parameters)

    @property
    def title(self) -> str:
        """What the report calls what it makes."""
        return self.path if self.in_memory is None else f"{self.in_memory.name}{IN_MEMORY}"

    @property
    def code(self) -> str | None:
        """A digest of the user's code behind it; None of what a library defines, and where there is no source."""
        if self.in_memory is not None:
            return self.in_memory.code
        find_modules_here(self.path)
        return source_digest(self.path)

    def _import(self) -> Callable[..., Any]:
        if self.in_memory is not None:
            return self.in_memory.make
        refuse_text_of_object(self.setting, self.path)
        module, _, name = self.path.rpartition(".")
        find_modules_here(self.path)
        try:
            target = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError, ValueError) as error:
            raise SettingError(
                f"cannot be imported: {error}",
                setting=f"{self.setting}._target_",
                value=self.path,
                cure="name a class or a function as PACKAGE.MODULE.NAME",
            ) from error
        if not callable(target):
            raise SettingError(
                "not callable", setting=f"{self.setting}._target_", value=self.path, cure="name a class or a function"
            )
        return target

    def _typed(self, target: Any, parameters: Mapping[str, inspect.Parameter], context: set[str]) -> dict[str, Any]:
        """The settings, converted to the types that the signature names where OmegaConf knows such a type."""
        settings = {
            name: value
            for name, value in self.arguments.items()
            if name not in self.optional or (name in parameters and value is not None)
        }
        for name in settings:
            if name in context or (name not in parameters and not _takes_all(parameters)):
                names = sorted(set(parameters) - context)
                also = ["weight"] if self.setting.startswith("objective.") else []  # which every loss term has
                takes, nearest = ", ".join(names) or "none", suggestion(f"{self.setting}.{name}", names + also)
                raise SettingError(
                    f"no setting of {self.path}{nearest} (it takes {takes})",
                    setting=f"{self.setting}.{name}",
                    cure="remove it",
                )
        for name, parameter in parameters.items():
            required = parameter.default is parameter.empty and parameter.kind not in (
                parameter.VAR_KEYWORD,
                parameter.VAR_POSITIONAL,
            )
            if required and name not in {*settings, *context}:
                raise SettingError("missing", setting=f"{self.setting}.{name}", cure=f"{self.path} needs it")
        try:
            hints = get_type_hints(target.__init__ if inspect.isclass(target) else target)
        except (NameError, TypeError):  # types that are imported for a type checker alone; an object that is callable
            hints = {}
        return {
            name: converted(value, hints.get(name, Any), f"{self.setting}.{name}") for name, value in settings.items()
        }


def _takes_all(parameters: Mapping[str, inspect.Parameter]) -> bool:
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())


def converted(value: Any, kind: Any, setting: str) -> Any:
    """`value` as the type `kind`; as it is where pydantic knows no such type.

    Raises:
        SettingError: it is none of that type.
    """
    from pydantic import ConfigDict, TypeAdapter, ValidationError
    from pydantic.errors import PydanticUserError

    try:
        adapter = TypeAdapter(kind, config=ConfigDict(coerce_numbers_to_str=True))
    except (PydanticUserError, TypeError, ValueError):
        return value
    try:
        return adapter.validate_python(value)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        if first["type"] in (
            "missing",
            "too_long",
        ):  # a tuple of another length, of which its reader says what it needs
            return value
        reason = "A list or tuple is needed" if first["type"] in ("tuple_type", "list_type") else first["msg"]
        written = "null" if value is None else value
        raise SettingError(
            "does not fit", setting=setting, value=written, cure=f"{reason[0].lower()}{reason[1:]}"
        ) from error


def component(
    setting: str,
    settings: dict[str, Any],
    package: str,
    kind: str | None = None,
    optional: tuple[str, ...] = (),
    named: Collection[str] = (),
) -> Component:
    """What `settings` names: a callable of the user's by `_target_`, else the class of a file of `package`.

    Args:
        settings: the settings as they were written.
        kind: the built-in one to take where `settings` names none.
        optional: as in Component.
        named: the settings of the group that the command line names, "" where it names an option. Where it chooses the
            callable, what a recipe, say, has set for another one is optional, too.

    Raises:
        SettingError: no file of `package` has that name.
    """
    arguments = {name: value for name, value in settings.items() if name not in ("_target_", "kind")}
    _check_values(setting, arguments)
    if isinstance(path := arguments.get("path"), str):
        arguments["path"] = expanded(path)
    if "_target_" in named or ("_target_" not in settings and {"", "kind"} & {*named}):
        of_kinds = {name for one in kinds(package) for name in Component(setting, built_in(package, one)).takes()}
        optional += tuple(name for name in arguments if name in of_kinds and name not in named)
    if (target := settings.get("_target_")) is not None:
        held = target if isinstance(target, InMemory) else None
        return Component(setting, str(target), arguments, optional, held)
    kind = str(settings.get("kind", kind))
    if kind not in (names := kinds(package)):
        of_key = "kind" not in settings and package == TERMS  # a loss is chosen by the name of its group
        nearest = suggestion(setting, names, "objective.") if of_key else did_you_mean(kind, names)
        raise SettingError(
            f"{'no such loss' if of_key else 'not known'}{nearest}",
            setting=setting if of_key else f"{setting}.kind",
            value=None if of_key else kind,
            cure=f"choose one of {', '.join(names)}, or name a callable of your own as {setting}._target_",
        )
    return Component(setting, built_in(package, kind), arguments, optional)


def by_name(group: str, noun: str, values: Mapping[str, Any]) -> dict[str, Component]:
    """Callables of the user's by the names that the user gives them, in a group that has no built-in ones.

    Raises:
        SettingError: an entry has no `_target_`; the line calls it a `noun`.
    """
    for name, settings in values.items():
        if not isinstance(settings, dict) or settings.get("_target_") is None:
            raise SettingError(
                f"names no {noun}",
                setting=f"{group}.{name}",
                cure=f"give a class of your own as {group}.{name}._target_",
            )
    return {name: component(f"{group}.{name}", settings, "") for name, settings in values.items()}


def _check_values(setting: str, value: Any) -> None:
    """Refuse numbers that are not finite or larger than any setting has, and an empty path."""
    if isinstance(value, dict):
        for name, inner in value.items():
            _check_values(f"{setting}.{name}", inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            _check_values(setting, inner)
    elif isinstance(value, str) and not value.strip() and setting.endswith(".path"):
        raise SettingError(EMPTY, setting=setting, value=value, cure=GIVE)
    elif isinstance(value, float) and not math.isfinite(value):
        raise SettingError("not finite", setting=setting, value=value, cure="give a number")
    elif isinstance(value, int | float) and abs(value) > LARGEST:
        verdict = "large" if value > 0 else "small"
        raise SettingError(f"too {verdict}", setting=setting, value=value, cure="give a number from -1e12 to 1e12")


def kinds(package: str) -> list[str]:
    """The built-in choices of a package: its modules, sorted; those that begin with an underscore are none."""
    folder = importlib.import_module(package).__path__
    return sorted(module.name for module in pkgutil.iter_modules(folder) if not module.name.startswith("_"))


def built_in(package: str, kind: str) -> str:
    """The import path of a built-in choice."""
    return f"{package}.{kind}.{class_name(kind)}"


def class_name(kind: str) -> str:
    """The class that a file holds: `hidden_mse` -> `HiddenMse`."""
    return "".join(part.capitalize() for part in kind.split("_"))
