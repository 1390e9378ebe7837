"""Turns Hydra's configuration into `Config`; beside it only what reads the command line knows Hydra.

Behind `build` there is no OmegaConf. Hydra is imported inside the functions that need it, so that processes which only
read settings start quickly.
"""

from collections.abc import Callable
from dataclasses import asdict, fields, is_dataclass
from enum import Enum
from typing import Any, TypeVar

from distill.config.component import (
    OPTIMIZERS,
    SCHEDULES,
    SOURCES,
    TABLES,
    TERMS,
    Component,
    component,
    convert,
    kinds,
)
from distill.config.flat_settings import flatten
from distill.config.meant_overrides import REPLACED, apply_overrides
from distill.config.mixture_settings import HELDOUT, MIXTURE, mixture
from distill.config.ramp import Ramp
from distill.config.settings import (
    RECIPES,
    CacheConfig,
    ChainConfig,
    Config,
    CorpusConfig,
    CorpusFlags,
    EvaluateConfig,
    MemberConfig,
    ObjectiveConfig,
    ObjectiveFlags,
    OptimizerConfig,
    OptimizerFlags,
    SetConfig,
    SourceConfig,
    StudentConfig,
    TeacherConfig,
    TermConfig,
    TokensConfig,
)
from distill.config.unknown import explain
from distill.config.written import escaped, without_environment, written_and_compared
from distill.runtime.errors import SettingError
from distill.runtime.nearest import did_you_mean

WHOLE = ("given", "compared")  # of Config: all settings together
NAMED = (*REPLACED, "evaluate.by_set")  # settings whose entries have names that the schema does not know
NOT_GIVEN = ("warmup_steps", "end_lr")  # of a schedule where they are null, so that not every schedule has to take them

Settings = TypeVar("Settings")
Frozen = TypeVar("Frozen", TeacherConfig, MemberConfig)


def register() -> None:
    """Make the schema and the recipes known to Hydra.

    Hydra finds a group by the name of its folder, so `recipes/x.yaml` can be `recipe/x` only through the ConfigStore.
    """
    from hydra.core.config_store import ConfigStore
    from omegaconf import OmegaConf

    store = ConfigStore.instance()
    store.store(name="schema", node=_schema())
    for file in sorted(RECIPES.glob("*.yaml")):
        store.store(group="recipe", name=file.stem, node=OmegaConf.load(file), package="_global_")


def add_recipe(name: str, settings: dict[str, Any]) -> None:
    """Make these settings, nested by the names of the command line, known to this process as `+recipe=name`."""
    from hydra.core.config_store import ConfigStore
    from omegaconf import OmegaConf

    ConfigStore.instance().store(group="recipe", name=name, node=OmegaConf.create(settings), package="_global_")


def _schema() -> Any:
    """Types and defaults of every setting; groups that take settings of a user's own callable have defaults only."""
    from omegaconf import OmegaConf

    config = Config()
    schema = {each.name: getattr(config, each.name) for each in fields(config) if each.name not in WHOLE}
    # null: the source's own default, which may be that of a user's own class.
    schema["corpus"] = {each.name: None for each in fields(SourceConfig) if each.name != "kind"}
    for part in (TokensConfig(), CacheConfig(), CorpusFlags()):
        schema["corpus"] |= _plain(part)
    schema["corpus"]["sources"] = {}
    schema["student"] = {
        name: value for name, value in _plain(StudentConfig()).items() if name not in ("kind", "custom")
    }
    schema["teacher"] = {
        name: value for name, value in _plain(TeacherConfig()).items() if name not in ("kind", "custom")
    }
    objective = _plain(ObjectiveConfig())
    schema["objective"] = {name: value for name, value in objective.items() if name != "terms"}
    schema["optimizer"], schema["schedule"] = _plain(OptimizerFlags()), {}
    created = OmegaConf.create(schema)
    for name in NAMED:  # names of the user's, or fields that transformers refuses itself
        OmegaConf.set_struct(OmegaConf.select(created, name), False)
    return created


def _plain(settings: Any) -> dict[str, Any]:
    """A dataclass as a dict that anything can be merged into."""
    return {name: value.value if isinstance(value, Enum) else value for name, value in asdict(settings).items()}


def build(composed: Any, overrides: list[str] | None = None) -> Config:
    """Hydra's DictConfig -> plain dataclasses.

    Args:
        overrides: those of the command line; `composed` is changed in place by those that replace a whole dict.

    Raises:
        SettingError: a key that no part of Distill reads, a value of the wrong type, or one that was left open.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    apply_overrides(composed, overrides or [])
    try:
        container = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise SettingError(explain(error)) from error
    assert isinstance(container, dict)
    given = {str(name): value for name, value in container.items()}
    written_down, compared = written_and_compared(composed, given)
    config = Config(given=written_down, compared=compared)
    groups = {each.name: getattr(config, each.name) for each in fields(Config) if each.name not in WHOLE}
    for name in given:
        if name not in groups:
            raise SettingError(
                f"{name} is no setting of Distill{did_you_mean(name, [*groups, 'recipe'])}: a recipe is +recipe=NAME, "
                "and --cfg job shows the rest"
            )
    for name, default in groups.items():
        if name in OPEN_GROUPS:
            setattr(config, name, OPEN_GROUPS[name](group_of(name, given.get(name))))
        elif is_dataclass(default):
            setattr(config, name, _typed(type(default), group_of(name, given.get(name)), name))
        else:
            setattr(config, name, convert(given.get(name, default), type(default), name))
    for name, source in config.evaluate.sources.items():
        config.evaluate.sources[name] = _source(f"evaluate.sources.{name}", source)
    for name, measure in config.evaluate.measures.items():
        config.evaluate.measures[name] = _measure(f"evaluate.measures.{name}", measure)
    for name, own in config.evaluate.by_set.items():
        config.evaluate.by_set[name] = _of_set(config.evaluate, name, own)
    for name, member in config.teacher.members.items():
        if not isinstance(member, dict):
            raise SettingError(f"teacher.members.{name}={member} is no teacher: write {{path: {member}}}")
        config.teacher.members[name] = _frozen_model(MemberConfig, member, f"teacher.members.{name}")
    return config


def group_of(name: str, given: Any) -> dict[str, Any]:
    """The settings of a group. Raises SettingError where one value stands in place of them."""
    if not isinstance(given, dict):
        raise SettingError(f"{name}={written(given)}: {name} is a group of settings, give {name}.NAME=VALUE")
    return {str(key): value for key, value in given.items()}


def written(value: Any) -> str:
    """A value as it is written on the command line."""
    return "null" if value is None else str(value)


def chain_config(composed: Any, overrides: list[str]) -> ChainConfig | None:
    """The chain that a recipe names; None where it names one job.

    Raises:
        SettingError: settings besides those of the chain, which no stage would read.
    """
    from omegaconf.errors import OmegaConfBaseException

    if composed.get("chain") is None:
        return None
    own = ("chain.", "recipe", "hydra.")
    if others := [each for each in overrides if not each.lstrip("+~").startswith(own)]:
        raise SettingError(
            f"{others[0]}: this recipe is a chain, whose stages have settings of their own: give chain.given.NAME, or "
            "write it into chain.stages.NAME.settings"
        )
    try:
        # A variable's value would stand on the command line of the stage, for everybody on this machine to read.
        given = group_of("chain", escaped(without_environment(composed)["chain"]))
    except OmegaConfBaseException as error:
        raise SettingError(explain(error)) from error
    if left_open := [name for name, value in flatten(given).items() if value == "???"]:
        raise SettingError(f"chain.{left_open[0]} is missing: give it a value")
    return _typed(ChainConfig, {name: value for name, value in given.items() if name != "given"}, "chain")


def _typed(cls: type[Settings], given: dict[str, Any], setting: str) -> Settings:
    """A dataclass from these values; errors name `setting` and the key."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        typed = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(cls), given))
    except OmegaConfBaseException as error:
        raise SettingError(f"{setting}.{explain(error)}") from error
    assert isinstance(typed, cls)
    return typed


def _take(given: dict[str, Any], cls: type[Any]) -> dict[str, Any]:
    """Remove the keys that are fields of `cls` from `given`, and give them with their values."""
    return {each.name: given.pop(each.name) for each in fields(cls) if each.name in given}


def corpus_config(given: dict[str, Any]) -> CorpusConfig:
    """The group `corpus` as it is written on the command line: settings of the source, of its tokens and its caches."""
    given = dict(given)
    tokens = _typed(TokensConfig, _take(given, TokensConfig), "corpus")
    cache = _typed(CacheConfig, _take(given, CacheConfig), "corpus")
    own = _typed(CorpusFlags, _take(given, CorpusFlags), "corpus")
    sources = given.pop("sources", None) or {}
    if given.get("kind") == MIXTURE:
        mixed, weights = mixture(sources, given, _source)
        return CorpusConfig(
            source=SourceConfig(MIXTURE), tokens=tokens, cache=cache, sources=mixed, weights=weights, **asdict(own)
        )
    if sources:
        raise SettingError(f"corpus.sources is for a mixture, and corpus.kind={given.get('kind')}: set corpus=mixture")
    return CorpusConfig(source=_source("corpus", given), tokens=tokens, cache=cache, **asdict(own))


def _source(setting: str, given: Any) -> SourceConfig | Component:
    if not isinstance(given, dict):
        raise SettingError(f"{setting}={written(given)} is no source of text: write {{kind: text, path: FILE}}")
    if given.get("_target_") is not None:
        return component(setting, given, SOURCES, optional=tuple(each.name for each in fields(SourceConfig)))
    kind = str(given.get("kind"))
    if kind in kinds(TABLES):
        arguments = {name: value for name, value in given.items() if value is not None}
        return component(setting, arguments, TABLES)
    if kind != HELDOUT and kind not in (known := [*kinds(SOURCES), *kinds(TABLES)]):
        raise SettingError(
            f"{setting}.kind={kind} is not known{did_you_mean(kind, known)}: choose one of {', '.join(known)}, or name "
            f"a class of your own as {setting}._target_"
        )
    return _typed(SourceConfig, {name: value for name, value in given.items() if value is not None}, setting)


def student_config(given: dict[str, Any]) -> StudentConfig:
    """The group `student`: built-in settings, or those of the callable that `_target_` names."""
    if given.get("_target_") is None:
        return _typed(StudentConfig, given, "student")
    # A scale may set the dropout, say, of any student.
    optional = tuple(each.name for each in fields(StudentConfig) if each.name != "tokenizer")
    arguments = {name: value for name, value in given.items() if name != "tokenizer"}  # a callable gets it loaded
    made = component("student", arguments, "", optional=optional)
    return StudentConfig(kind="custom", path=given.get("path"), tokenizer=given.get("tokenizer"), custom=made)


def teacher_config(given: dict[str, Any]) -> TeacherConfig:
    """The group `teacher`: built-in settings, or those and further ones of the callable that `_target_` names."""
    return _frozen_model(TeacherConfig, given, "teacher")


def _frozen_model(cls: type[Frozen], given: dict[str, Any], setting: str) -> Frozen:
    """The only teacher or one of several."""
    if given.get("_target_") is None:
        return _typed(cls, given, setting)
    own = {each.name for each in fields(cls)}
    known = {name: value for name, value in given.items() if name in own}
    settings = _typed(cls, known | {"kind": "custom"}, setting)
    settings.custom = component(setting, given, "", optional=tuple(own))
    return settings


def objective_config(given: dict[str, Any]) -> ObjectiveConfig:
    """The group `objective`: settings of the objective itself; every other key is a loss term with its settings."""
    given = dict(given)
    objective = ObjectiveConfig(**vars(_typed(ObjectiveFlags, _take(given, ObjectiveFlags), "objective")))
    if "temperature" in given:
        objective.temperature = _number("objective.temperature", given.pop("temperature"))
    for name, term in given.items():
        setting = f"objective.{name}"
        if not name.isidentifier():
            raise SettingError(f"{setting}: the name of a loss term has to be letters, digits and underscores")
        if not isinstance(term, dict):
            raise SettingError(f"{setting}={term} is neither a setting of the objective nor a loss term with a weight")
        arguments = dict(term)
        weight = _number(f"{setting}.weight", arguments.pop("weight", 1.0))
        # A term that takes a temperature and has none of its own gets the objective's.
        shared = "temperature" not in arguments
        temperature = arguments.setdefault("temperature", objective.temperature)
        if isinstance(temperature, dict):
            temperature = _number(f"{setting}.temperature", temperature)
        ramp = temperature if isinstance(temperature, Ramp) else None
        if ramp is not None:
            arguments["temperature"] = ramp.start
        make = component(setting, arguments, TERMS, kind=name, optional=("temperature",) if shared else ())
        follows = ramp is not None and (not shared or "temperature" in make.takes())
        objective.terms[name] = TermConfig(weight, make, ramp if follows else None)
    return objective


def _number(setting: str, value: Any) -> float | Ramp:
    """A number, or one that follows a schedule."""
    if isinstance(value, dict):
        for name in ("start", "end"):
            if value.get(name) is None:
                raise SettingError(f"{setting}.{name} is missing: a schedule is {{start: NUMBER, end: NUMBER}}")
        return _typed(Ramp, value, setting)
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise SettingError(f"{setting}={value} is not a number, nor a schedule: {{start: NUMBER, end: NUMBER}}")
    return float(value)


def optimizer_config(given: dict[str, Any]) -> OptimizerConfig:
    """The group `optimizer`: learning rate and clipping, and the settings of the optimizer itself."""
    given = dict(given)
    flags = _typed(OptimizerFlags, _take(given, OptimizerFlags), "optimizer")
    return OptimizerConfig(**asdict(flags), make=component("optimizer", given, OPTIMIZERS, kind="adamw"))


def schedule_config(given: dict[str, Any]) -> Component:
    """The group `schedule`: the settings of what gives the learning rate over the run."""
    given = {name: value for name, value in given.items() if value is not None or name not in NOT_GIVEN}
    return component("schedule", given, SCHEDULES, kind="linear")


def _of_set(settings: EvaluateConfig, name: str, given: Any) -> SetConfig:
    """What is set of one evaluation set; what is not is as for all of them."""
    setting = f"evaluate.by_set.{name}"
    own = group_of(setting, {} if given is None else given)
    share = group_of(f"{setting}.pseudo_perplexity", own.get("pseudo_perplexity") or {})
    shared = {"share": settings.pseudo_perplexity.share}
    return _typed(SetConfig, {"rows": settings.rows, **own, "pseudo_perplexity": shared | share}, setting)


def _measure(setting: str, given: Any) -> Component:
    if not isinstance(given, dict) or given.get("_target_") is None:
        raise SettingError(f"{setting} names no measure: give a class of your own as {setting}._target_")
    return component(setting, given, "")


# Groups whose settings may be those of the user's own callables.
OPEN_GROUPS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "corpus": corpus_config,
    "teacher": teacher_config,
    "student": student_config,
    "objective": objective_config,
    "optimizer": optimizer_config,
    "schedule": schedule_config,
}
