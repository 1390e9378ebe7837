"""One line for what pydantic, Hydra and OmegaConf refuse: the setting, its value, the nearest name, the cure."""

import re
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from distill.config.model import kinds_of
from distill.config.override_text import in_shell
from distill.config.synonyms import suggestion
from distill.runtime.errors import SettingError, did_you_mean
from distill.runtime.version import pip_install

Model = TypeVar("Model", bound=BaseModel)
GROUPS = ("model_type", "model_attributes_type", "dict_type", "dataclass_type")
WHOLE = ("int_type", "int_parsing", "int_from_float", "int_parsing_size")
NUMBERS = (*WHOLE, "no_number", "float_type", "float_parsing")
LISTS = ("list_type", "tuple_type", "too_long", "too_short")
REFUSED = "refused"  # the type of an error whose message is a problem and, behind a semicolon, its cure
LIMITS = ("greater_than", "greater_than_equal", "less_than", "less_than_equal", "out_of_range")
LONGEST = 300  # characters of a value that are shown
NO_TRIAL = "No trials are completed"  # what Optuna ends a search with where no run gave a number
EXTRAS = {"hydra/sweeper/optuna": "search"}  # options that come with another package, and how to install it


def parse(model: type[Model], values: Mapping[str, Any], name: str) -> Model:
    """The section that these settings make. Raises SettingError, which calls the section `name`."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise setting_error_of(error, model, name, values) from error


def setting_error_of(error: ValidationError, model: Any, name: str, given: Any = None) -> SettingError:
    """The refusals of a section, which the command line calls `name`, as one: one of each setting.

    Args:
        given: the settings as they were given, of which a list is shown as a whole.
    """
    refusals: dict[str, SettingError] = {}  # by setting: a union finds an error for each of its types
    for details in error.errors(include_url=False):
        place = _place(model, details["loc"], name, details["type"])
        if isinstance(cause := details.get("ctx", {}).get("error"), SettingError):
            refusals.setdefault(cause.setting or place.name, cause.within(place.name))
        elif place.name not in refusals:
            refusals[place.name] = _refusal(details, place, _list_of(details["loc"], given))
    return all_of(list(refusals.values()))


def all_of(refusals: Sequence[SettingError]) -> SettingError:
    """Several refusals as one, in one line."""
    single = [each for refusal in refusals for each in (refusal.refusals or [refusal])]
    return single[0] if len(single) == 1 else SettingError(refusals=single)


def _list_of(location: tuple[int | str, ...], values: Any) -> list[Any] | None:
    """The list whose entry is wrong; None where the error is about no entry of a list."""
    for part in location:
        if isinstance(values, list) and isinstance(part, int):
            return values
        values = values.get(part) if isinstance(values, dict) else None
    return None


class Place(NamedTuple):
    """Where an error is."""

    name: str  # of the setting, as on the command line
    field: FieldInfo | None  # None: in a dict, or no field at all
    owner: Any  # the model that has the field, or has none of that name


def _place(model: Any, location: tuple[int | str, ...], name: str, kind: str) -> Place:
    """Follow a location into a model. A setting's name has no indices of lists and no tags of unions."""
    owner, field, holder = model, None, model
    for number, part in enumerate(location, 1):
        models = list(models_of(owner))
        fields = {alias: one for section in models for alias, one in by_name(section).items()}
        others = _values_of_others(owner, models)
        if part in fields:
            holder, field, owner = owner, fields[str(part)], fields[str(part)].annotation
        elif isinstance(part, str) and (others is not None or (kind == "extra_forbidden" and number == len(location))):
            holder, field, owner = owner, None, others
        else:  # an index of a list, or the tag of a union
            continue
        name = f"{name}.{part}".lstrip(".")
    return Place(name, field, holder)


def by_name(model: type[BaseModel]) -> dict[str, FieldInfo]:
    """The fields of a model by their names on the command line."""
    return {field.alias or name: field for name, field in model.model_fields.items()}


def _values_of_others(annotation: Any, models: Sequence[type[BaseModel]]) -> Any:
    """The type of the values whose names no model has: of a dict, or of a section with names of the user's."""
    for model in models:
        if (extra := model.__annotations__.get("__pydantic_extra__")) is not None:
            return get_args(extra)[1]
    plain = annotation
    while get_origin(plain) is Annotated:
        plain = get_args(plain)[0]
    return get_args(plain)[1] if get_origin(plain) is dict else None


def models_of(annotation: Any) -> Iterator[type[BaseModel]]:
    """All models that a type may be."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    elif get_origin(annotation) is not dict:
        for inner in get_args(annotation):
            yield from models_of(inner)


def _refusal(error: ErrorDetails, place: Place, entries: list[Any] | None) -> SettingError:
    name, kind, value = place.name, error["type"], error["input"]
    if kind == "extra_forbidden":
        names = [field for model in models_of(place.owner) for field in by_name(model)]
        before = name.rpartition(".")[0]
        names += [] if before else ["recipe"]
        return unknown_setting(name, suggestion(name, names, f"{before}." if before else ""))
    if kind == "missing" and entries is None:
        return SettingError("missing", setting=name, cure="give it a value")
    if kind in GROUPS:
        return group_of_settings(name, value)
    if value is None:
        return not_null(name)
    if kind in ("literal_error", "enum"):
        options = options_of(place.field)
        problem, cure = f"not known{did_you_mean(value, options)}", f"choose one of {', '.join(options)}"
    elif kind in LISTS or kind == "missing":
        problem, cure = "no list of so many entries", "give it as [A,B]"
        value = value if entries is None else entries
        if kind in ("list_type", "tuple_type"):
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
    if isinstance(number, str) and kind in LIMITS:  # of a command, whose values are texts
        number = int(number) if number.lstrip("+-").isdecimal() else float(number)
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
        problem, cure = "does not fit", f"{error['msg'][0].lower()}{error['msg'][1:]}"
    if entries is not None:
        problem = f"{shown(number)} is {problem}"
    value = shown(number if entries is None else entries)
    return SettingError(problem, setting=f"{place.name}{context.get('part', '')}", value=value, cure=cure)


def shown(value: Any) -> str:
    """A value as it is written on the command line."""
    if isinstance(value, Enum):
        return str(value.value)
    text = "null" if value is None else str(value)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."


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


def setting_error(error: Exception) -> SettingError | None:
    """An error of Hydra, of OmegaConf or of a search as one of a setting; None for any other."""
    packages = {base.__module__.partition(".")[0] for base in type(error).__mro__}
    if packages & {"hydra", "omegaconf"}:
        return explain(error)
    if isinstance(error, ValueError) and str(error).startswith(NO_TRIAL):
        return SettingError(
            "no run of the search has given a number to optimize", cure="the lines above and its page say why"
        )
    return None


def explain(error: Exception) -> SettingError:
    """An error of Hydra or OmegaConf: the setting, what is wrong with it, and where to look."""
    if (missing := getattr(error, "missing_cfg_file", None)) is not None:
        return _no_such_option(str(missing), list(getattr(error, "options", None) or []))
    if isinstance(override := getattr(error, "override", None), str):
        return _not_understood(override)
    chain: list[BaseException] = [error]
    while cause := chain[-1].__cause__:
        chain.append(cause)
    # Hydra wraps OmegaConf's error, which says what is wrong with the value.
    inner = next((e for e in reversed(chain) if getattr(e, "full_key", None)), error)
    key = getattr(inner, "full_key", None) or getattr(error, "full_key", None)
    if type(inner).__name__ in ("ConfigKeyError", "ConfigAttributeError") and key:
        return _no_such_setting(str(key), getattr(inner, "parent_node", None))
    return _by_its_first_line(error, inner, str(key or ""))


def _not_understood(override: str) -> SettingError:
    name, _, value = override.partition("=")
    is_nested = value[:1] in ("[", "{", "'", '"')
    example = f"\"{name or 'NAME'}=['a, b', 'c=d']\"" if is_nested else in_shell(name or "NAME", value)
    cure = f"write NAME=VALUE, and texts with special signs in quotes, such as {example}"
    if not name or "=" not in override:
        return SettingError(f"{override} is not understood", cure="write NAME=VALUE")
    return SettingError("not understood", setting=name, value=value, cure=cure)


def _by_its_first_line(error: Exception, inner: BaseException, key: str) -> SettingError:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    what = str(inner).strip().splitlines()[0] if inner is not error else lines[0]
    if inner is error:
        options = [line for line in lines[1:] if not any(word in line for word in ("full_key", "_type="))]
        what = " ".join([what, *options])
    if variable := re.search(r"Environment variable '(\w+)' not found", what):
        problem = f"the environment variable {variable[1]} is not set"
        return SettingError(problem, setting=key, cure=f"set it, or give {key}=VALUE")
    if missing := re.match(r"Missing mandatory value: (\S+)", what):
        return SettingError("missing", setting=key or missing[1], cure="give it a value")
    if absent := re.match(r"Could not delete from config\. '(\S+)' does not exist", what):
        return SettingError("there is no value to take out", setting=f"~{absent[1]}", cure="leave it out")
    if reference := re.match(r"Interpolation key '(\S+)' not found", what):
        return SettingError(f"there is no setting {reference[1]} to refer to", setting=key, cure="correct its name")
    return SettingError(what, setting="" if key in what else key)


def _no_such_option(missing: str, options: list[str]) -> SettingError:
    """For an option of a group, such as `teacher/embeded`."""
    group, _, name = missing.rpartition("/")
    if missing in EXTRAS:
        return SettingError("not installed", setting=group, value=name, cure=pip_install(EXTRAS[missing]))
    if group == "hydra/launcher":
        plugin = f"hydra-{name.partition('_')[0]}-launcher"
        problem, cure = "no launcher that is installed", f"pip install {plugin}, or leave it out for one run at a time"
        return SettingError(problem, setting=group, value=name, cure=cure)
    if not options:
        return SettingError(f"{missing}: there is no such group or option", cure="--help shows those that there are")
    problem, cure = f"there is no {missing}{did_you_mean(name, options)}", f"choose one of {', '.join(sorted(options))}"
    return SettingError(problem, setting=group, value=name, cure=cure)


def _no_such_setting(key: str, parent: Any) -> SettingError:
    """For a name that is none of a section, such as `steps`, which stands in a group.

    Args:
        parent: the node of OmegaConf that has no such key.
    """
    name = key.rpartition(".")[2]
    nearest = suggestion(key, _names(parent), key.removesuffix(name))
    if not nearest:
        same = [setting for setting in _leaves(_root(parent), "") if setting.rpartition(".")[2] == name]
        nearest = f" (did you mean {' or '.join(same[:3])}?)" if same else ""
    return unknown_setting(key, nearest)


def _names(node: Any) -> list[str]:
    try:
        return [str(name) for name in node]
    except Exception:  # what is no mapping, or one that is missing
        return []


def _root(node: Any) -> Any:
    while (above := getattr(node, "_get_parent", lambda: None)()) is not None:
        node = above
    return node


def _leaves(node: Any, path: str) -> Iterator[str]:
    """The dotted names of all settings below a node."""
    for name in _names(node):
        if hasattr(node, "_get_node"):
            inner = node._get_node(name)
            yield f"{path}{name}"
            if hasattr(inner, "keys"):
                yield from _leaves(inner, f"{path}{name}.")
