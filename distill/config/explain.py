"""Every setting that a run reads, with its unit, its meaning and who set it, found by composing three times."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from distill.config.base import flatten
from distill.config.command_line import CommandLine
from distill.config.component import Component
from distill.config.compose import ComposedRun, Composition, compose, compose_one, default_settings, run_of
from distill.config.errors import by_name, place_of
from distill.config.models import READ_BY
from distill.config.override_text import parse_override
from distill.config.settings import Config
from distill.runtime.redaction import redacted

COMMAND_LINE, DEFAULT = "command line", "default"


@dataclass(frozen=True)
class Setting:
    """One setting by its dotted name.

    Attributes:
        value: as it was given: a reference to another setting or to the environment is not resolved.
        unit, sentence: empty where there is none.
        origin: who set it: `default`, `recipe smoke`, an option such as `optimizer=lamb`, or the command line.
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
    composition = compose_one(line)
    job, origins = run_of(composition), _origins(line, composition)
    listed = [
        Setting(name, value, *_described(name), origins[name])
        for name, value in _values(composition).items()
        if _is_read(job.config, name)
    ]
    return job, list(_with_arguments(listed, job.config))


def _values(composition: Composition) -> dict[str, Any]:
    """Settings by their dotted names, without logins."""
    from omegaconf import OmegaConf

    return flatten(redacted(OmegaConf.to_container(composition.settings, resolve=False)))


def _origins(line: CommandLine, whole: Composition) -> dict[str, str]:
    """Who set each setting: the options of its groups, the recipe or the command line, whichever changed it last."""
    choices = dict(whole.hydra.runtime.choices)
    options = {group: f"{group}={choice}" for group, choice in choices.items() if not group.startswith("hydra/")}
    recipe = [options.pop("recipe")]
    of_options, of_recipe = (
        _values(compose(CommandLine(line.options, [*given, *options.values()]))) for given in (["~recipe"], recipe)
    )
    names = [override.key_or_group for override in map(parse_override, line.overrides) if override is not None]
    named = tuple(f"{name}." for name in names if "." in name or name not in choices)
    defaults, origins = default_settings(), dict[str, str]()
    for name, value in _values(whole).items():
        group = name.partition(".")[0]
        if f"{name}.".startswith(named) or value != of_recipe.get(name):
            origins[name] = COMMAND_LINE
        elif value != of_options.get(name):
            origins[name] = f"recipe {whole.recipe}"
        else:
            is_default = name in defaults and defaults[name] == value
            origins[name] = DEFAULT if is_default else f"{group}={choices.get(group)}"
    return origins


def _described(name: str) -> tuple[str, str]:
    """The unit and the sentence of a setting by its dotted name; each is empty where there is none."""
    place = place_of(Config, tuple(name.split(".")))
    if place.field is None or place.name != name:
        return "", ""
    extra = place.field.json_schema_extra
    return str(extra.get("unit", "")) if isinstance(extra, dict) else "", place.field.description or ""


def _is_read(config: Config, name: str) -> bool:
    """Whether a run reads a setting; a callable of the user's reads what its signature has."""
    group, _, rest = name.partition(".")
    part = rest.partition(".")[0]
    if group == "student" and config.student.custom is None:
        return config.student.init in READ_BY.get(part, (config.student.init,))
    if group == "teacher" and config.teacher.is_none:
        return part == "path"
    section: Any = getattr(config, group, None)
    make: Component | None = getattr(section, "custom", None) or getattr(section, "made_by", None)
    if make is None or part in ("tokenizer", "gradient_checkpointing", "path", "_target_"):
        return True
    return part not in make.optional or part in make.takes()


def _with_arguments(listed: list[Setting], config: Config) -> Iterator[Setting]:
    """The settings, behind those of a callable what it takes besides, with its defaults."""
    values = {setting.name for setting in listed}
    makes: Mapping[str, Component] = {
        "optimizer": config.optimizer.make,
        "schedule": config.schedule.make,
        **{f"objective.{name}": config.objective.component(name) for name in config.objective.terms},
    }
    for group, part in groupby(listed, key=lambda setting: _group_of(setting.name, makes)):
        fields = by_name(makes[group].schema()) if group in makes else {}
        for setting in part:
            field = fields.get(setting.name.removeprefix(f"{group}."))
            yield setting if field is None else replace(setting, sentence=setting.sentence or field.description or "")
        for name, field in fields.items():
            full = f"{group}.{name}"
            if not any(f"{other}.".startswith(f"{full}.") for other in values) and not field.is_required():
                default = "${objective.temperature}" if name == "temperature" else field.default
                yield Setting(full, default, "", field.description or "", DEFAULT)


def _group_of(name: str, makes: Mapping[str, Component]) -> str:
    return next((group for group in makes if name.startswith(f"{group}.")), name.partition(".")[0])
