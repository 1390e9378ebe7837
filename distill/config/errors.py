"""One line for what pydantic, Hydra and OmegaConf refuse: the setting, its value, the nearest name, the cure."""

import re
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from typing import Annotated, Any, NamedTuple, TypeVar, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from distill.config.base import flatten
from distill.config.override_text import in_shell
from distill.config.synonyms import suggestion
from distill.runtime.errors import SettingError, did_you_mean
from distill.runtime.version import pip_install

Model = TypeVar("Model", bound=BaseModel)
GROUPS = ("model_type", "model_attributes_type", "dict_type", "dataclass_type")
REFUSED = "refused"  # the type of an error whose message is a problem and, behind a semicolon, its cure
LIMITS = {"ge": "from", "gt": "above", "le": "up to", "lt": "and below"}  # in the order in which they are said
LONGEST = 300  # characters of a value that are shown
NO_TRIAL = "No trials are completed"  # what Optuna ends a search with where no run gave a number
EXTRAS = {"hydra/sweeper/optuna": "search"}  # options that come with another package, and how to install it
# What stands in an error of Hydra or OmegaConf: the problem, where {} is the name in it, and the cure.
OF_HYDRA = {
    r"Environment variable '(\w+)' not found": ("the environment variable {} is not set", "set it, or give a value"),
    r"Missing mandatory value: (\S+)": ("missing", "give it a value"),
    r"Could not delete from config\. '(\S+)' does not exist": ("there is no value to take out", "leave it out"),
    r"Interpolation key '(\S+)' not found": ("there is no setting {} to refer to", "correct its name"),
}


def parse(model: type[Model], values: Mapping[str, Any], name: str) -> Model:
    """The section that these settings make. Raises SettingError, which calls the section `name`."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise setting_error_of(error, model, name) from error


def setting_error_of(error: ValidationError, model: Any, name: str) -> SettingError:
    """The refusals of a section, which the command line calls `name`, as one: one of each setting."""
    refusals: dict[str, SettingError] = {}  # by setting: a union finds an error for each of its types
    for details in error.errors(include_url=False):
        place = place_of(model, details["loc"], name, details["type"])
        if isinstance(cause := details.get("ctx", {}).get("error"), SettingError):
            refusal = cause.within(place.name)
            refusals.setdefault(refusal.setting or place.name, refusal)
        elif place.name not in refusals:
            refusals[place.name] = _refusal(details, place)
    single = [each for refusal in refusals.values() for each in (refusal.refusals or [refusal])]
    return single[0] if len(single) == 1 else SettingError(refusals=single)


class Place(NamedTuple):
    """Where a setting or an error is."""

    name: str  # of the setting, as on the command line
    field: FieldInfo | None  # None: in a dict, or no field at all
    owner: Any  # the model that has the field, or has none of that name


def place_of(model: Any, location: tuple[int | str, ...], name: str = "", kind: str = "") -> Place:
    """Follow a location into a model. A setting's name has no indices of lists and no tags of unions.

    Args:
        name: what the command line calls the model.
        kind: of the error that is there.
    """
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
    while get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    return get_args(annotation)[1] if get_origin(annotation) is dict else None


def models_of(annotation: Any) -> Iterator[type[BaseModel]]:
    """All models that a type may be."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    elif get_origin(annotation) is not dict:
        for inner in get_args(annotation):
            yield from models_of(inner)


def _refusal(error: ErrorDetails, place: Place) -> SettingError:
    name, kind, value = place.name, error["type"], error["input"]
    section = name.rpartition(".")[0]
    if kind == "extra_forbidden":
        names = [field for model in models_of(place.owner) for field in by_name(model)]
        return unknown_setting(
            name, suggestion(name, names if section else [*names, "recipe"], f"{section}." if section else "")
        )
    if kind == "missing":
        return SettingError("missing", setting=name, cure="give it a value")
    if kind in GROUPS:
        return group_of_settings(name, value)
    if value is None:
        return SettingError("not possible", setting=name, value="null", cure="give it a value, or leave it out")
    problem, cure = error["msg"].removeprefix("Input "), ""  # such as: should be a valid integer
    limits = _limits(place.field)
    if kind == REFUSED:
        problem, _, cure = problem.partition("; ")
    elif kind in ("literal_error", "enum"):
        problem += did_you_mean(value, re.findall(r"'([^']*)'", error["ctx"]["expected"]))
    elif kind in ("list_type", "tuple_type"):
        cure = f"write {name}=[{shown(value)}]"
    elif kind == "string_type":
        text = f"[{','.join(map(str, value))}]" if isinstance(value, list) else "TEXT"
        cure = f"give one in quotes such as {in_shell(name, text)}"
    elif limits:
        cure = f"give a number {limits}"
    return SettingError(f"{problem[0].lower()}{problem[1:]}", setting=name, value=shown(value), cure=cure)


def _limits(field: FieldInfo | None) -> str:
    """The range of a number, such as `from 1 up to 64`; empty where it has none."""
    constraints = [] if field is None else field.metadata
    limits = [(words, getattr(one, name, None)) for name, words in LIMITS.items() for one in constraints]
    return " ".join(f"{words} {limit:,}" for words, limit in limits if limit is not None)


def unknown_setting(name: str, nearest: str) -> SettingError:
    """For a name that no setting has; `nearest` is what `suggestion` gives."""
    return SettingError(f"not known{nearest}", setting=name, cure="distill settings shows all that there are")


def group_of_settings(name: str, value: Any) -> SettingError:
    """For a value in place of several settings."""
    return SettingError("a group of settings", setting=name, value=shown(value), cure=f"give {name}.NAME=VALUE")


def shown(value: Any) -> str:
    """A value as it is written on the command line."""
    if isinstance(value, Enum):
        return str(value.value)
    text = "null" if value is None else str(value)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."


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
    key = str(getattr(inner, "full_key", None) or "")
    if type(inner).__name__ in ("ConfigKeyError", "ConfigAttributeError") and key:
        return _no_such_setting(key, getattr(inner, "parent_node", None))
    what = str(inner).strip().splitlines()[0]
    for begin, (problem, cure) in OF_HYDRA.items():
        if found := re.search(begin, what):
            setting = f"~{found[1]}" if "delete" in begin else key or found[1]
            return SettingError(problem.format(found[1]), setting=setting, cure=cure)
    return SettingError(what, setting="" if key in what else key)


def _not_understood(override: str) -> SettingError:
    name, is_set, value = override.partition("=")
    if not name or not is_set:
        return SettingError(f"{override} is not understood", cure="write NAME=VALUE")
    example = f"\"{name}=['a, b', 'c=d']\"" if value[:1] in ("[", "{", "'", '"') else in_shell(name, value)
    cure = f"write NAME=VALUE, and texts with special signs in quotes, such as {example}"
    return SettingError("not understood", setting=name, value=value, cure=cure)


def _no_such_option(missing: str, options: list[str]) -> SettingError:
    """For an option of a group, such as `teacher/embeded`."""
    group, _, name = missing.rpartition("/")
    if missing in EXTRAS:
        return SettingError("not installed", setting=group, value=name, cure=pip_install(EXTRAS[missing]))
    if group == "hydra/launcher":
        cure = f"pip install hydra-{name.partition('_')[0]}-launcher, or leave it out for one run at a time"
        return SettingError("no launcher that is installed", setting=group, value=name, cure=cure)
    if not options:
        return SettingError(f"{missing}: there is no such group or option", cure="--help shows those that there are")
    problem, cure = f"there is no {missing}{did_you_mean(name, options)}", f"choose one of {', '.join(sorted(options))}"
    return SettingError(problem, setting=group, value=name, cure=cure)


def _no_such_setting(key: str, parent: Any) -> SettingError:
    """For a name that is none of a section, such as `steps`, which stands in a group.

    Args:
        parent: the node of OmegaConf that has no such key.
    """
    from omegaconf import DictConfig, OmegaConf

    name = key.rpartition(".")[2]
    if not isinstance(parent, DictConfig):
        return unknown_setting(key, suggestion(key, []))
    nearest = suggestion(key, map(str, parent), key.removesuffix(name))
    if not nearest:
        root: Any = OmegaConf.to_container(parent._get_root())
        settings = flatten(root)
        same = [setting for setting in settings if setting.rpartition(".")[2] == name]
        nearest = f" (did you mean {' or '.join(same[:3])}?)" if same else ""
    return unknown_setting(key, nearest)
