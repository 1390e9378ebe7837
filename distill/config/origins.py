"""Every setting that a command line gives, with its unit, its meaning and who set it."""

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from distill.config.command_line import CommandLine, check_overrides
from distill.config.component import TERMS, Component, kinds
from distill.config.composition import ComposedRun, compose, files_of, run_of
from distill.config.flat_settings import flatten
from distill.config.folders import CONF, RECIPES
from distill.config.layers import RECIPE, SCHEMA, Layer
from distill.config.schema import arguments_of, described, settings_schema
from distill.config.settings import Config
from distill.config.student import STUDENTS
from distill.config.teacher import TEACHERS
from distill.runtime.errors import SettingError
from distill.runtime.redaction import redacted

COMMAND_LINE, DEFAULT = "command line", "default"  # who sets what no file sets
OPEN = "???"  # OmegaConf's mark of a value that has to be given


@dataclass(frozen=True)
class Setting:
    """One setting by its dotted name.

    Attributes:
        value: as it was given: a reference to another setting or to the environment is not resolved.
        unit, sentence: empty where there is none.
        origin: who set it, such as `default`, `recipe smoke` or `optimizer=lamb (conf/optimizer/lamb.yaml)`.
    """

    name: str
    value: Any
    unit: str
    sentence: str
    origin: str


def explained(line: CommandLine) -> tuple[ComposedRun, list[Setting]]:
    """The run of a command line, and those of its settings that it reads.

    Raises:
        SettingError: bad input, or a chain, whose stages have settings of their own.
    """
    check_overrides(line)
    composition = compose(line)
    settings = composition.settings
    if settings.get("chain") is not None:
        raise SettingError(
            "this recipe is a chain, whose stages have settings of their own", cure="name a stage's recipe"
        )
    job = run_of(composition)
    layers, values, schema = files_of(composition), _values(settings), settings_schema()
    listed = [
        Setting(name, value, *described(schema, name), origin)
        for name, value, origin in _with_origins(values, layers, line)
        if _is_read(job.config, name)
    ]
    return job, list(_with_arguments(listed))


def _is_read(config: Config, name: str) -> bool:
    """Whether a run reads a setting: what a recipe has set for another kind of its group is not read."""
    group, _, rest = name.partition(".")
    section: Any = getattr(config, group, None)
    part = rest.partition(".")[0]
    make: Component | None = getattr(section, "make", None) or getattr(section, "custom", None)
    if isinstance(section, Component):
        make = section
    if (kinds_of_group := {"teacher": TEACHERS, "student": STUDENTS}.get(group)) is not None:
        is_shared = part in kinds_of_group.fields and part not in getattr(type(section), "model_fields", ())
        return not is_shared or (make is not None and part in make.takes())
    return make is None or part not in make.optional or part in make.takes()


def _with_arguments(listed: list[Setting]) -> Iterator[Setting]:
    """The settings, behind those of each loss term what it takes besides, with its defaults."""
    values = {setting.name: setting.value for setting in listed}
    for (section, term), part in groupby(listed, key=lambda setting: tuple(f"{setting.name}..".split(".")[:2])):
        yield from part
        name = f"{section}.{term}"
        kind = str(values.get(f"{name}.kind", term))
        if section != "objective" or f"{name}._target_" in values or kind not in kinds(TERMS):
            continue
        for argument, schema in arguments_of(TERMS, kind).items():
            is_named = any(other == f"{name}.{argument}" or other.startswith(f"{name}.{argument}.") for other in values)
            if not is_named and "default" in schema:
                default = "${objective.temperature}" if argument == "temperature" else schema["default"]
                yield Setting(f"{name}.{argument}", default, "", schema.get("description", ""), DEFAULT)


def _values(settings: Any) -> dict[str, Any]:
    """Settings by their dotted names, without logins."""
    from omegaconf import OmegaConf

    return flatten(redacted(OmegaConf.to_container(settings, resolve=False)))


def _with_origins(values: dict[str, Any], layers: Iterable[Layer], line: CommandLine) -> Iterator[tuple[str, Any, str]]:
    """Name, value and origin: the last layer with that name, or the command line, which changes what no layer has."""
    from omegaconf import OmegaConf

    origins, set_by_layers = dict[str, str](), dict[str, Any]()
    for layer in layers:
        content: Any = OmegaConf.to_container(layer.settings, resolve=False)
        for name, value in flatten(content).items():
            if value != OPEN or name not in origins:
                origins[name], set_by_layers[name] = _origin(layer), value
    names = [override.key_or_group for override in line.parsed() if not override.is_delete()]
    for name, value in values.items():
        is_named = any(name == other or name.startswith(f"{other}.") for other in names if other not in _groups(layers))
        is_changed = name not in set_by_layers or redacted(set_by_layers[name]) != value
        yield name, value, COMMAND_LINE if is_named or is_changed else origins[name]


def _groups(layers: Iterable[Layer]) -> set[str]:
    return {layer.option.rpartition("/")[0] for layer in layers}


def _origin(layer: Layer) -> str:
    """Who a layer is, in words."""
    if layer.option == SCHEMA:
        return DEFAULT
    group, _, option = layer.option.rpartition("/")
    if group == RECIPE:
        label = f"recipe {option}"
        return label if layer.file is None or layer.file.parent == RECIPES else f"{label} ({_shown(layer.file)})"
    return f"{group}={option} ({_shown(layer.file)})" if layer.file else f"{group}={option}"


def _shown(file: Path) -> str:
    """A file as a user finds it: one of this package below `conf`, another from the folder that the user is in."""
    if file.is_relative_to(CONF):
        return str(Path(CONF.name) / file.relative_to(CONF))
    return min(str(file), os.path.relpath(file), key=len)
