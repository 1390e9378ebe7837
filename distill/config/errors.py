"""Turns what pydantic finds wrong with settings into one line: the setting, its value, the nearest name, the cure."""

from collections.abc import Iterator, Sequence
from enum import Enum
from types import UnionType
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, Tag, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from distill.config.model import kinds_of
from distill.config.override_text import in_shell
from distill.config.synonyms import suggestion
from distill.runtime.errors import SettingError, did_you_mean

Model = TypeVar("Model", bound=BaseModel)
GROUPS = ("model_type", "model_attributes_type", "dict_type", "dataclass_type")
WHOLE = ("int_type", "int_parsing", "int_from_float", "int_parsing_size")
NUMBERS = (*WHOLE, "no_number", "float_type", "float_parsing")
REFUSED = "refused"  # the type of an error whose message is a problem and, behind a semicolon, its cure
LIMITS = ("greater_than", "greater_than_equal", "less_than", "less_than_equal", "out_of_range")


def parse(model: type[Model], values: dict[str, Any], name: str) -> Model:
    """The section that these settings make. Raises SettingError, which calls the section `name`."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise setting_error_of(error, model, name, values) from error


def setting_error_of(error: ValidationError, model: Any, name: str, written_settings: Any = None) -> SettingError:
    """The refusals of a section, which the command line calls `name`, as one: one of each setting.

    Args:
        written_settings: the settings as they were written, of which a list is shown as a whole.
    """
    refusals: dict[str, SettingError] = {}  # by setting: a union finds an error for each of its types
    for details in error.errors(include_url=False):
        place = _place(model, details["loc"], name)
        if isinstance(cause := details.get("ctx", {}).get("error"), SettingError):
            refusals.setdefault(place.name, cause)
        elif place.name not in refusals:
            refusals[place.name] = _refusal(details, place, _list_of(details["loc"], written_settings))
    return all_of(list(refusals.values()))


def all_of(refusals: Sequence[SettingError]) -> SettingError:
    """Several refusals as one, in one line."""
    single = [each for refusal in refusals for each in (refusal.refusals or [refusal])]
    return single[0] if len(single) == 1 else SettingError(refusals=single)


def _list_of(location: tuple[int | str, ...], values: Any) -> list[Any] | None:
    """The list whose entry is wrong; None where the error is about no entry of a list."""
    for part in location:
        if isinstance(values, list):
            return values
        values = values.get(part) if isinstance(values, dict) else None
    return None


class Place(NamedTuple):
    """Where an error is."""

    name: str  # of the setting, as on the command line
    field: FieldInfo | None  # None: in a dict, or no field at all
    owner: Any  # the model that has the field, or has none of that name


def _place(model: Any, location: tuple[int | str, ...], name: str) -> Place:
    """Follow a location into a model. A setting's name has no indices of lists and no tags of unions."""
    owner, field, holder = model, None, model
    for part in location:
        if part in (members := _members(owner)):
            owner = members[str(part)]
            continue
        models = list(models_of(owner))
        if having := [candidate for candidate in models if part in candidate.model_fields]:
            holder, field = having[0], having[0].model_fields[str(part)]
            name, owner = f"{name}.{part}".lstrip("."), field.annotation
        elif models or get_origin(owner) is dict:
            holder, field = owner, None
            name, owner = f"{name}.{part}".lstrip("."), (get_args(owner) or (Any, Any))[1]
    return Place(name, field, holder)


def models_of(annotation: Any) -> Iterator[type[BaseModel]]:
    """All models that a type may be."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    elif get_origin(annotation) is not dict:
        for inner in get_args(annotation):
            yield from models_of(inner)


def _members(annotation: Any) -> dict[str, Any]:
    """The members of a union by what pydantic calls them in a location."""
    members: dict[str, Any] = {}
    for member in get_args(annotation) if get_origin(annotation) in (Union, UnionType, Annotated) else ():
        members |= {marker.tag: member for marker in getattr(member, "__metadata__", ()) if isinstance(marker, Tag)}
        if isinstance(member, type) and issubclass(member, BaseModel):
            members[member.__name__] = member
        members |= _members(member)
    return members


def _refusal(error: ErrorDetails, place: Place, entries: list[Any] | None) -> SettingError:
    name, kind, value = place.name, error["type"], error["input"]
    if kind == "extra_forbidden":
        names = [field for model in models_of(place.owner) for field in model.model_fields]
        before = name.rpartition(".")[0]
        return unknown_setting(name, suggestion(name, names, f"{before}." if before else ""))
    if kind == "missing":
        return SettingError("missing", setting=name, cure="give it a value")
    if kind in GROUPS:
        return group_of_settings(name, value)
    if value is None:
        return not_null(name)
    if kind in ("literal_error", "enum"):
        options = options_of(place.field)
        problem, cure = f"not known{did_you_mean(value, options)}", f"choose one of {', '.join(options)}"
    elif kind.startswith("list"):
        problem, cure = "no list", f"write {name}=[{shown(value)}]"
    elif kind.startswith("bool"):
        problem, cure = "neither true nor false", "give one of them"
    elif kind == "string_type":
        as_text = "[" + ",".join(map(str, value)) + "]" if isinstance(value, list) else "TEXT"
        problem, cure = "no text", f"give one, in quotes such as {in_shell(name, as_text)}"
    elif kind == REFUSED:
        # Its message may name another setting beside this one.
        problem, _, cure = error["msg"].replace("{section}", name.rpartition(".")[0]).partition("; ")
    else:
        return _number_refusal(error, place, entries)
    return SettingError(problem, setting=name, value=shown(value), cure=cure)


def unknown_setting(name: str, nearest: str) -> SettingError:
    """For a name that no setting has; `nearest` is what `suggestion` gives."""
    return SettingError(f"not known{nearest}", setting=name, cure="distill settings shows all that there are")


def group_of_settings(name: str, value: Any) -> SettingError:
    """For a value in place of several settings."""
    return SettingError("a group of settings", setting=name, value=shown(value), cure=f"give {name}.NAME=VALUE")


def not_null(name: str) -> SettingError:
    """For a setting that has to have a value."""
    return SettingError("not possible", setting=name, value="null", cure="give it a value, or leave it out")


def _number_refusal(error: ErrorDetails, place: Place, entries: list[Any] | None) -> SettingError:
    context = error.get("ctx", {})
    kind, number = error["type"], context.get("number", error["input"])
    if isinstance(number, int) and place.field is not None and float in kinds_of(place.field.annotation):
        number = float(number)
    limits = range_of(place.field) if kind != "out_of_range" else Range(context["ge"], context["le"])
    cure = f"give a number {limits}" if limits else "give a number"
    if kind in NUMBERS:
        problem = f"no {'whole ' * (kind in WHOLE)}number"
    elif kind == "finite_number":
        problem = "not finite"
    elif kind in LIMITS and limits is not None:
        problem = f"too {'large' if number >= limits.most else 'small'}"
    else:
        problem, cure = error["msg"], ""
    if entries is not None:
        problem = f"{shown(number)} is {problem}"
    value = shown(number if entries is None else entries)
    return SettingError(problem, setting=f"{place.name}{context.get('part', '')}", value=value, cure=cure)


def shown(value: Any) -> str:
    """A value as it is written on the command line."""
    if isinstance(value, Enum):
        return str(value.value)
    return "null" if value is None else str(value)


def options_of(field: FieldInfo | None) -> list[str]:
    """The words that a field takes."""
    kinds = [] if field is None else [field.annotation, *get_args(field.annotation)]
    options: list[str] = []
    for kind in kinds:
        if get_origin(kind) is Literal:
            options += [str(option) for option in get_args(kind)]
        elif isinstance(kind, type) and issubclass(kind, Enum):
            options += [str(option.value) for option in kind]
    return options


class Range(NamedTuple):
    """From `least` to `most`; an end that is `open` does not belong to it."""

    least: float
    most: float
    open_below: bool = False
    open_above: bool = False

    def __str__(self) -> str:
        low = f"above {_number(self.least)}" if self.open_below else f"from {_number(self.least)}"
        if self.open_above:
            return (
                f"{low} and below {_number(self.most)}" if self.open_below else f"{low} to below {_number(self.most)}"
            )
        return f"{low} and at most {_number(self.most)}" if self.open_below else f"{low} to {_number(self.most)}"


def range_of(field: FieldInfo | None) -> Range | None:
    """The range of a number, or of the numbers of a list; None for a field without one."""
    limits: dict[str, float] = {}
    for constraint in [] if field is None else [*field.metadata, *_inner(field.annotation)]:
        for name in ("ge", "gt", "le", "lt"):
            if (limit := getattr(constraint, name, None)) is not None:
                limits[name] = limit
    if not limits.keys() & {"ge", "gt"} or not limits.keys() & {"le", "lt"}:
        return None
    low, high = limits.get("ge", limits.get("gt")), limits.get("le", limits.get("lt"))
    assert low is not None and high is not None
    return Range(low, high, "gt" in limits, "lt" in limits)


def _inner(annotation: Any) -> Iterator[Any]:
    """The constraints on the entries of a list."""
    for inner in get_args(annotation):
        if get_origin(annotation) is Annotated and isinstance(inner, FieldInfo):
            yield from inner.metadata
        yield from _inner(inner)


def _number(number: float) -> str:
    return f"{number:,.0f}" if abs(number) >= 10_000 and number < 1e15 else f"{number:g}"
