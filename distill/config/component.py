"""What settings name: a built-in object by `kind`, which is a file of a package, or the user's own by `_target_`.

`_target_` is Hydra's word for the import path of a callable. The settings beside it are its keyword arguments; the
callable's signature is their schema, types included.
"""

import importlib
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, create_model, model_validator
from pydantic.errors import PydanticUserError
from pydantic.json_schema import SkipJsonSchema, WithJsonSchema

from distill.config import HERE
from distill.config.base import Settings
from distill.config.errors import by_name, setting_error_of, unknown_setting
from distill.config.synonyms import suggestion
from distill.runtime.errors import MAX_NAMES, SettingError, did_you_mean
from distill.runtime.users_code import MISTAKES, find_modules_here, is_users, mistake, source_digest

# The packages that hold what settings name by `kind`.
SOURCES = "distill.data.sources"
TABLES = "distill.data.tables"
TERMS = "distill.objective.terms"
OPTIMIZERS = "distill.optim.optimizers"
SCHEDULES = "distill.optim.schedules"

TARGET = "_target_"
GROUP = "_group_"  # what its parent calls an entry of a dict, such as objective.soft
IN_MEMORY = " in memory"  # behind what the report calls an object of a program
PREFIX = "in memory: "  # of what config.yaml has of such an object
# How a ValueError begins that names an argument, `warmup=2 must be below 1`: the name, the value and the rest.
ARGUMENT = re.compile(r"(\w+)(?:=(\[.*\]|\S+?))?:? (.*)", re.DOTALL)
PASSED = ("self", "params", "lr", "total_steps", "peak_lr")  # arguments that a run gives to what a kind names
FIELD = "of_"  # before the names of arguments, which may be those of a model's own methods
SEVERAL = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)


class InMemory:
    """An object that `distill.distill` was called with, as settings hold it in place of an import path.

    Attributes:
        name: of its class or function, for people.
        digest: of what it is: weights, texts, or code and values. A resumed run has to have the same; "" for observers.
        make: gives it; the settings beside it are the arguments.
        tokenizer: of a model.
        code: a digest of the user's code behind it that `digest` has no part of; None where that is not known.
    """

    # OmegaConf, which holds it for a while, would make settings of a dataclass.
    def __init__(
        self, name: str, digest: str, make: Callable[..., Any], tokenizer: Any = None, code: str | None = None
    ) -> None:
        self.name, self.digest, self.make, self.tokenizer, self.code = name, digest, make, tokenizer, code

    def __str__(self) -> str:
        return f"{PREFIX}{self.name}" + (f", digest {self.digest[:16]}" if self.digest else "")


@dataclass(frozen=True)
class Component:
    """A callable by its import path, and the settings to call it with."""

    setting: str  # what error lines call it, such as objective.soft
    path: str  # package.module.Name
    arguments: dict[str, Any] = field(default_factory=dict)
    # Settings of the whole group, or of another component: passed on where they have a value and are taken.
    optional: tuple[str, ...] = field(default=(), compare=False)
    in_memory: InMemory | None = None  # in place of what `path` imports

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
            found = ARGUMENT.match(str(error))
            if found is None or found[1] not in inspect.signature(target).parameters:
                raise SettingError(error, setting=self.setting) from error
            problem, _, cure = found[3].removeprefix("is ").rpartition(": ")
            setting = f"{self.setting}.{found[1]}"
            raise SettingError(problem or "out of range", setting=setting, value=found[2], cure=cure) from error
        except MISTAKES as error:
            if not is_users(self.path):
                raise
            raise SettingError(mistake(error), setting=f"{self.setting}.{TARGET}", value=self.path) from error

    def bind(self, **context: Any) -> tuple[Callable[..., Any], dict[str, Any]]:
        """What a call would call, and with which arguments; SettingError as there, but for values it refuses."""
        target = self._import()
        parameters = inspect.signature(target).parameters
        takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
        bound = {name: value for name, value in context.items() if name in parameters or takes_all}
        settings = {
            name: value
            for name, value in self.arguments.items()
            if value is not None or name in parameters  # null is what was not given
            if name not in self.optional or (name in parameters and value is not None)
        }
        model = arguments_model(target, frozenset(bound))
        self._refuse_unknown(settings, model)
        try:
            checked = model.model_validate(settings)
        except ValidationError as error:
            raise setting_error_of(error, model, self.setting) from error
        extra = checked.model_extra or {}
        return target, {**bound, **{name: extra.get(name, getattr(checked, FIELD + name, None)) for name in settings}}

    def refuse_unknown(self) -> None:
        """Raises SettingError for an argument that the callable does not take, whatever a run gives it besides."""
        given = {name for name, value in self.arguments.items() if value is not None}
        self._refuse_unknown(given.difference(self.optional), self.schema())

    def takes(self) -> set[str]:
        """The names that the callable's signature has."""
        return set(inspect.signature(self._import()).parameters)

    def schema(self) -> type[BaseModel]:
        """A model of the settings that the callable takes, apart from what a run gives it."""
        return arguments_model(self._import())

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

    def _refuse_unknown(self, given: Iterable[str], model: type[BaseModel]) -> None:
        names = sorted(by_name(model))
        name = next((name for name in given if name not in names), None)
        if name is None or model.model_config.get("extra") == "allow":
            return
        also = ["weight"] if self.setting.startswith("objective.") else []  # which every loss term has
        nearest = suggestion(f"{self.setting}.{name}", names + also)
        raise SettingError(
            f"no setting of {self.path}{nearest}; it takes {', '.join(names) or 'none'}",
            setting=f"{self.setting}.{name}",
            cure=f"leave it out; ~{self.setting}.{name} takes out what a recipe sets",
        )

    def _import(self) -> Callable[..., Any]:
        if self.in_memory is not None:
            return self.in_memory.make
        setting, path = f"{self.setting}.{TARGET}", self.path
        if path.startswith(PREFIX):
            problem = "was an object of the program that started the run"
            cure = "call distill.distill() with it again, or name a folder or an import path"
            raise SettingError(problem, setting=setting, value=path, cure=cure)
        module, _, name = self.path.rpartition(".")
        find_modules_here(self.path)
        try:
            target: Callable[..., Any] = getattr(importlib.import_module(module), name)
            inspect.signature(target)  # which says what it takes
        except (ImportError, AttributeError, TypeError, ValueError) as error:
            problem, cure = f"cannot be imported: {error}", "name a class or a function as PACKAGE.MODULE.NAME"
            raise SettingError(problem, setting=setting, value=path, cure=cure) from error
        return target


def arguments_model(target: Callable[..., Any], without: frozenset[str] = frozenset(PASSED)) -> type[BaseModel]:
    """A model of the arguments that a callable takes by name, from its signature.

    Args:
        without: arguments that are no settings.
    """
    try:
        hints = get_type_hints(target.__init__ if inspect.isclass(target) else target)
    except (NameError, TypeError):  # types that are imported for a type checker alone; an object that is callable
        hints = {}
    fields: dict[str, Any] = {}
    for name, parameter in inspect.signature(target).parameters.items():
        if name not in without and parameter.kind not in SEVERAL:
            default = ... if parameter.default is parameter.empty else parameter.default
            kind = hints.get(name, Any) if _is_known(hints.get(name, Any)) else Any
            fields[FIELD + name] = kind, Field(default, alias=name, description=_sentence(target, name))
    takes_all = any(one.kind is one.VAR_KEYWORD for one in inspect.signature(target).parameters.values())
    config = ConfigDict(extra="allow" if takes_all else "forbid", coerce_numbers_to_str=True, allow_inf_nan=False)
    return create_model(getattr(target, "__name__", "Arguments"), __config__=config, **fields)


def _is_known(kind: Any) -> bool:
    """Whether pydantic knows a type, and can check it."""
    try:
        TypeAdapter(kind)
    except (PydanticUserError, TypeError, ValueError):
        return False
    return True


def _sentence(target: Any, name: str) -> str | None:
    """What the docstrings of a class say of an argument: `name`: a sentence."""
    for kind in inspect.getmro(target) if inspect.isclass(target) else (target,):
        own = getattr(kind, "__dict__", {})  # which functions of C do not have
        for text in (own.get("__doc__"), getattr(own.get("__init__"), "__doc__", None)):
            if match := re.search(rf"`{name}`:\s+(.+?)\.(?:\s|$)", text or "", re.DOTALL):
                sentence = " ".join(match[1].split())
                return f"{sentence[0].upper()}{sentence[1:]}."
    return None


def group_named(name: str) -> Any:
    """The field of a part that has the name of its group of settings; its parent gives it to entries of a dict."""
    return Field(name, alias=GROUP, exclude=True, repr=False, description="What the command line calls this group.")


class Part(Settings, extra="allow"):
    """Settings that name a callable; those that are no fields are its arguments.

    Attributes:
        target: in place of a built-in one.
        group: the name of this group of settings, such as objective.soft.
    """

    package: ClassVar[str] = ""  # of the built-in ones

    target: Annotated[str | InMemory | None, WithJsonSchema({"type": "string"})] = Field(
        default=None,
        alias="_target_",
        description="Import path of a callable of yours, in place of a built-in one.",
    )
    group: SkipJsonSchema[str] = group_named("")

    @property
    def arguments(self) -> dict[str, Any]:
        """The settings that are no fields of this class."""
        return dict(self.model_extra or {})

    def component(
        self, kind: str = "", more: Mapping[str, Any] | None = None, optional: tuple[str, ...] = ()
    ) -> Component:
        """The callable that is named, with its arguments.

        Args:
            kind: of the built-in one, where `_target_` names none.
            more: further arguments.
            optional: as in Component.
        """
        arguments = self.arguments | dict(more or {})
        if self.target is not None:
            held = self.target if isinstance(self.target, InMemory) else None
            return Component(self.group, str(self.target), arguments, optional, held)
        return Component(self.group, built_in(self.package, kind), arguments, optional)

    def refuse_arguments(self) -> None:
        """Raises SettingError for a name that no field has, where nothing takes further ones."""
        if unknown := [name for name, value in self.arguments.items() if value is not None]:
            names = [name for name in type(self).model_fields if name not in ("group", "target")]
            nearest = suggestion(f"{self.group}.{unknown[0]}", names, f"{self.group}.")
            raise unknown_setting(f".{unknown[0]}", nearest)


class Chosen(Part):
    """What is chosen by `kind`, a file of `package`, unless `_target_` names a callable of the user's."""

    kind: str

    @model_validator(mode="after")
    def _is_known(self) -> "Chosen":
        names = kinds(self.package)
        if self.target is None and self.kind not in names:
            cure = f"choose one of {', '.join(names)}, or name a callable of your own as {self.group}.{TARGET}"
            problem = f"not known{did_you_mean(self.kind, names)}"
            raise SettingError(problem, setting=".kind", value=self.kind, cure=cure)
        return self

    @property
    def make(self) -> Component:
        """What is chosen, with its arguments."""
        return self.component(self.kind)


class Named(Part):
    """What is chosen by `_target_` alone, such as an observer: there are no built-in ones."""

    @model_validator(mode="after")
    def _is_named(self) -> "Named":
        if self.target is None:
            cure = f"give a class of your own as {self.group}.{TARGET}"
            raise SettingError("names no callable", setting=".", cure=cure)
        return self

    @property
    def make(self) -> Component:
        return self.component()


def in_group(group: str) -> Callable[[Any], Any]:
    """Gives the entries of a dict of parts the names of their groups, such as evaluate.sources.books."""

    def named(values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        return {
            name: value | {GROUP: f"{group}.{name}"} if isinstance(value, dict) else value
            for name, value in values.items()
        }

    return named


def takers(package: str, setting: str) -> str:
    """As `did_you_mean`: the setting of this very name that built-in choices take, `objective.jsd.beta` of a `beta`."""
    group, _, name = setting.rpartition(".")
    choices = [kind for kind in kinds(package) if name in Component(setting, built_in(package, kind)).takes()]
    nearest = [f"{group}.{kind}.{name}" for kind in choices[:MAX_NAMES]]
    return f" (did you mean {' or '.join(nearest)}?)" if nearest else ""


def kinds(package: str) -> list[str]:
    """The built-in choices of a package: its modules, sorted; those that begin with an underscore are none."""
    # Nothing is imported to read their names.
    folders = getattr(sys.modules.get(package), "__path__", [HERE.joinpath(*package.split(".")[1:])])
    files = {path.stem for folder in folders for path in Path(folder).glob("*.py")}
    return sorted(name for name in files if not name.startswith("_"))


def built_in(package: str, kind: str) -> str:
    """The import path of a built-in choice."""
    return f"{package}.{kind}.{class_name(kind)}"


def class_name(kind: str) -> str:
    """The class that a file holds: `hidden_mse` -> `HiddenMse`."""
    return "".join(part.capitalize() for part in kind.split("_"))
