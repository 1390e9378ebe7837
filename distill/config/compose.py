"""Turns Hydra's configuration into typed settings; beside it only what reads the command line knows Hydra.

Behind `build` there is no OmegaConf. Hydra is imported inside the functions that need it, so that processes which only
read settings start quickly.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast

from distill.config.component import OPTIMIZERS, SCHEDULES, SOURCES, TABLES, TERMS, Component, by_name, component, kinds
from distill.config.errors import all_of, group_of_settings, parse, shown
from distill.config.flat_settings import flatten
from distill.config.layers import REPLACED, named_settings
from distill.config.mixture_settings import HELDOUT, MIXTURE, mixture
from distill.config.model import Settings
from distill.config.settings import (
    RECIPES,
    ChainConfig,
    Config,
    CorpusConfig,
    EvaluateConfig,
    ObjectiveConfig,
    ObjectiveFlags,
    OptimizerConfig,
    OptimizerFlags,
    SetConfig,
    SourceConfig,
    TermConfig,
)
from distill.config.student import STUDENTS, AnyStudentConfig, CustomStudentConfig, StudentConfig
from distill.config.synonyms import suggestion
from distill.config.teacher import (
    MEMBERS,
    TEACHERS,
    CustomMemberConfig,
    CustomTeacherConfig,
    FrozenModelConfig,
    MemberConfig,
    TeacherConfig,
)
from distill.config.unions import CUSTOM, Kinds
from distill.config.unknown import explain, takers
from distill.config.weight_schedule import WeightSchedule
from distill.config.written import without_environment, written_and_compared
from distill.runtime.errors import SettingError, did_you_mean

WHOLE = ("written", "compared")  # of Config: all settings together
# Settings whose entries have names of the user's, or of transformers: the command line needs no plus for them.
NAMED = (*REPLACED, *(f"evaluate.{name}" for name in ("by_set", "sources", "measures")))
NAMED += ("objective", "observers", "teacher.members")
# Settings of a corpus that are none of its source.
CORPUS = tuple(name for name in CorpusConfig.model_fields if name not in ("source", "weights"))
Group = dict[str, Any]  # the settings of a group as they were written, or sections by name
GROUP = Settings | Component | dict  # what a setting that is a group of settings becomes
SEVERAL = "several"
NOT_GIVEN = ("warmup_steps", "end_lr")  # of a schedule where they are null, so that not every schedule has to take them

Custom = TypeVar("Custom", CustomTeacherConfig, CustomMemberConfig)


def register() -> None:
    """Make the schema and the recipes known to Hydra, once for this process and again where a file has changed.

    Hydra finds a group by the name of its folder, so `recipes/x.yaml` can be `recipe/x` only through the ConfigStore.
    """
    _register_schema()
    for file in sorted(RECIPES.glob("*.yaml")):
        _register_recipe(file, file.stat().st_mtime_ns)


@cache
def _register_schema() -> None:
    from hydra.core.config_store import ConfigStore

    ConfigStore.instance().store(name="schema", node=_schema())


@cache
def _register_recipe(file: Path, _changed: int) -> None:
    from hydra.core.config_store import ConfigStore
    from omegaconf import OmegaConf

    ConfigStore.instance().store(group="recipe", name=file.stem, node=OmegaConf.load(file), package="_global_")


def add_recipe(name: str, settings: dict[str, Any]) -> None:
    """Make these settings, nested by the names of the command line, known to this process as `+recipe=name`."""
    from hydra.core.config_store import ConfigStore
    from omegaconf import OmegaConf

    ConfigStore.instance().store(group="recipe", name=name, node=OmegaConf.create(settings), package="_global_")


def _schema() -> Any:
    """The defaults of every setting, by the names of the command line."""
    from omegaconf import OmegaConf

    schema = {name: value for name, value in plain(Config()).items() if name not in WHOLE}
    # null: the source's own default, which may be that of a user's own class.
    source = dict.fromkeys(name for name in SourceConfig.model_fields if name != "kind")
    schema["corpus"] = source | {name: value for name, value in schema["corpus"].items() if name in CORPUS}
    schema |= {name: kinds.defaults() for name, kinds in (("student", STUDENTS), ("teacher", TEACHERS))}
    del schema["objective"]["terms"], schema["optimizer"]["make"]
    schema["schedule"] = {}
    created = OmegaConf.create(schema)
    for name in NAMED:  # names of the user's, or fields that transformers refuses itself
        OmegaConf.set_struct(OmegaConf.select(created, name), False)
    return created


@cache
def default_settings() -> dict[str, Any]:
    """The defaults of every setting by its dotted name on the command line, options of groups aside."""
    from omegaconf import OmegaConf

    schema = OmegaConf.to_container(_schema())
    assert isinstance(schema, dict)
    return flatten({str(name): section for name, section in schema.items()})


def plain(settings: Settings) -> dict[str, Any]:
    """A section as a dict that anything can be merged into."""
    return settings.model_dump(mode="json", fallback=str)


def build(composed: Any, overrides: Sequence[str] = (), given: Mapping[str, Any] | None = None) -> Config:
    """Hydra's DictConfig -> typed settings.

    Args:
        overrides: those of the command line, which has to be read.
        given: the values of a program by dotted names, which have to be read too.

    Raises:
        SettingError: an unknown key, a value of the wrong type, or one that was left open.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        container = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise explain(error) from error
    assert isinstance(container, dict)
    values = {str(name): value for name, value in container.items()}
    written, compared = written_and_compared(composed, values)
    names = [name for name in Config.model_fields if name not in WHOLE]
    for name in values:
        if name not in names:
            raise SettingError(
                f"no setting of Distill{suggestion(name, [*names, 'recipe'])}",
                setting=name,
                cure="a recipe is +recipe=NAME, and --cfg job shows the rest",
            )
    groups = {name: group_of(name, values.get(name)) for name in names if isinstance(getattr(Config(), name), GROUP)}
    made, refusals = _sections(groups, named := named_settings(overrides, given or {}))
    rest = {name: value for name, value in (values | groups).items() if name not in SECTIONS}
    try:
        config = parse(Config, rest | made | {"written": written, "compared": compared}, "")
    except SettingError as error:
        refusals.append(error)
    if refusals:
        raise all_of(refusals)
    config.train.refuse_unread(named["train"])
    return config


def _sections(groups: dict[str, Group], named: dict[str, set[str]]) -> tuple[Group, list[SettingError]]:
    """Those of `SECTIONS` that their settings make, and the refusals of the others."""
    made, refusals = Group(), list[SettingError]()
    for name, make in SECTIONS.items():
        try:
            made[name] = make(groups[name], named[name])
        except SettingError as error:
            refusals.append(error)
    return made, refusals


def group_of(name: str, values: Any) -> dict[str, Any]:
    """The settings of a group. Raises SettingError where one value stands in place of them."""
    if not isinstance(values, dict):
        raise group_of_settings(name, values)
    return {str(key): value for key, value in values.items()}


def chain_config(composed: Any, overrides: list[str]) -> ChainConfig | None:
    """The chain that a recipe names; None where it names one job.

    Raises:
        SettingError: settings besides those of the chain, which no stage would read.
    """
    from omegaconf.errors import OmegaConfBaseException

    if composed.get("chain") is None:
        return None
    chains = ("chain.", "recipe", "hydra.")
    if others := [override for override in overrides if not override.lstrip("+~").startswith(chains)]:
        raise SettingError(
            "this recipe is a chain, whose stages have settings of their own",
            setting=others[0].partition("=")[0],
            value=others[0].partition("=")[2],
            cure="give chain.given.NAME, or write it into chain.stages.NAME.settings",
        )
    try:
        # A variable's value would stand on the command line of the stage, for everybody on this machine to read.
        values = group_of("chain", without_environment(composed)["chain"])
    except OmegaConfBaseException as error:
        raise explain(error) from error
    if left_open := [name for name, value in flatten(values).items() if value == "???"]:
        raise SettingError("missing", setting=f"chain.{left_open[0]}", cure="give it a value")
    return parse(ChainConfig, {name: value for name, value in values.items() if name != "given"}, "chain")


def _take(values: dict[str, Any], cls: type[Settings]) -> dict[str, Any]:
    """Remove the keys that are fields of `cls` from `values`, and give them with their values."""
    return {name: values.pop(name) for name in cls.model_fields if name in values}


def corpus_config(values: dict[str, Any]) -> CorpusConfig:
    """The group `corpus` as it is written on the command line, with the settings of its source among its own."""
    source = {name: value for name, value in values.items() if name not in CORPUS}
    settings = {name: value for name, value in values.items() if name in CORPUS}
    sources = settings.pop("sources", None) or {}
    if values.get("kind") == MIXTURE:
        mixed, weights = mixture(sources, source, _source)
        parts = {"source": SourceConfig(kind=MIXTURE), "sources": mixed, "weights": weights}
        return parse(CorpusConfig, settings | parts, "corpus")
    if sources:
        raise SettingError(
            f"is for a mixture, but corpus.kind={values.get('kind')}",
            setting="corpus.sources",
            cure="set corpus=mixture",
        )
    return parse(CorpusConfig, settings | {"source": _source("corpus", source)}, "corpus")


def _source(setting: str, values: Any) -> SourceConfig | Component:
    if not isinstance(values, dict):
        raise SettingError(
            "no source of text", setting=setting, value=shown(values), cure="write {kind: text, path: FILE}"
        )
    if values.get("_target_") is not None:
        return component(setting, values, SOURCES, optional=tuple(SourceConfig.model_fields))
    kind = str(values.get("kind"))
    if kind in kinds(TABLES):
        arguments = {name: value for name, value in values.items() if value is not None}
        return component(setting, arguments, TABLES)
    if kind != HELDOUT and kind not in (choices := [*kinds(SOURCES), *kinds(TABLES)]):
        raise SettingError(
            f"not known{did_you_mean(kind, choices)}",
            setting=f"{setting}.kind",
            value=kind,
            cure=f"choose one of {', '.join(choices)}, or name a class of your own as {setting}._target_",
        )
    return parse(SourceConfig, {name: value for name, value in values.items() if value is not None}, setting)


def student_config(values: dict[str, Any], named: set[str]) -> StudentConfig:
    """The group `student`: built-in settings, or those of the callable that `_target_` names.

    Args:
        named: the settings that the command line names.
    """
    if values.get("_target_") is None:
        return cast(StudentConfig, STUDENTS.parse(values, "student", named))
    arguments = {
        name: value for name, value in values.items() if name not in ("init", *AnyStudentConfig.model_fields)
    }  # it gets its tokenizer loaded
    make = component("student", arguments, "", optional=STUDENTS.optional(CustomStudentConfig, values, named))
    shared = {name: values[name] for name in ("path", *AnyStudentConfig.model_fields) if name in values}
    return parse(CustomStudentConfig, {**shared, "init": CUSTOM, CUSTOM: make}, "student")


def teacher_config(values: dict[str, Any], named: set[str]) -> TeacherConfig:
    """The group `teacher`: built-in settings, or those and further ones of the callable that `_target_` names.

    Args:
        named: the settings that the command line names.
    """
    members = group_of("teacher.members", values.get("members", {}))
    made = {name: _member(name, member) for name, member in members.items()}
    if values.get("_target_") is not None:
        return _custom_teacher(CustomTeacherConfig, TEACHERS, values, "teacher", named)
    if values.get("kind") == SEVERAL:
        for name in sorted(named):
            if name in FrozenModelConfig.model_fields and TEACHERS.is_given(name, values[name]):
                raise SettingError(
                    "not read with teacher.kind=several",
                    setting=f"teacher.{name}",
                    value=shown(values[name]),
                    cure=f"set teacher.members.NAME.{name}",
                )
        values = values | {"members": made}
    return cast(TeacherConfig, TEACHERS.parse(values, "teacher", named))


def _member(name: str, values: Any) -> MemberConfig:
    if not isinstance(values, dict):
        raise SettingError(
            "no teacher",
            setting=f"teacher.members.{name}",
            value=shown(values),
            cure=f"write {{path: {shown(values)}}}",
        )
    setting, values = f"teacher.members.{name}", {"kind": "pretrained", **values}
    if values.get("_target_") is not None:
        return _custom_teacher(CustomMemberConfig, MEMBERS, values, setting, set(values))
    return cast(MemberConfig, MEMBERS.parse(values, setting, set(values)))


def _custom_teacher(
    section: type[Custom], kinds: Kinds, values: dict[str, Any], setting: str, named: set[str]
) -> Custom:
    """The only teacher or one of several, by a callable of the user's."""
    shared = {name: value for name, value in values.items() if name in section.model_fields}
    make = component(setting, values, "", optional=kinds.optional(section, values, named))
    return parse(section, shared | {"kind": CUSTOM, CUSTOM: make}, setting)


def objective_config(values: dict[str, Any]) -> ObjectiveConfig:
    """The group `objective`: settings of the objective itself; every other key is a loss term with its settings."""
    values = dict(values)
    flags = _take(values, ObjectiveFlags)
    default = ObjectiveConfig.model_fields["temperature"].default
    temperature = _number("objective.temperature", values.pop("temperature", default))
    terms = {name: _term(f"objective.{name}", term, temperature) for name, term in values.items()}
    return parse(ObjectiveConfig, flags | {"temperature": temperature, "terms": terms}, "objective")


def _term(setting: str, values: Any, shared: float | WeightSchedule) -> TermConfig:
    """A loss term; one that takes a temperature and has none of its own gets `shared`, that of the objective."""
    name = setting.rpartition(".")[2]
    if not name.isidentifier():
        raise SettingError("no name of a loss", setting=setting, cure="take letters, digits and underscores")
    if not isinstance(values, dict):
        if name in kinds(TERMS):
            problem = "a loss is a group of settings"
            raise SettingError(problem, setting=setting, value=shown(values), cure=f"give {setting}.weight=NUMBER")
        names = [*ObjectiveFlags.model_fields, "temperature", *kinds(TERMS)]
        nearest = takers(TERMS, setting) or suggestion(setting, names, "objective.")
        problem = f"neither a setting of the objective nor a loss{nearest}"
        of_all = f"losses are {', '.join(kinds(TERMS))}, each with a weight such as objective.soft.weight=1"
        cure = "give that in its place" if nearest else of_all
        raise SettingError(problem, setting=setting, value=shown(values), cure=cure)
    arguments = dict(values)
    weight = _number(f"{setting}.weight", arguments.pop("weight", 1.0))
    has_temperature = "temperature" in arguments
    temperature = arguments.setdefault("temperature", shared)
    if isinstance(temperature, dict):
        temperature = _number(f"{setting}.temperature", temperature)
    schedule = temperature if isinstance(temperature, WeightSchedule) else None
    if schedule is not None:
        arguments["temperature"] = schedule.start
    make = component(setting, arguments, TERMS, kind=name, optional=() if has_temperature else ("temperature",))
    follows = schedule is not None and (has_temperature or "temperature" in make.takes())
    return parse(TermConfig, {"weight": weight, "make": make, "temperature": schedule if follows else None}, setting)


def _number(setting: str, value: Any) -> float | WeightSchedule:
    """A number, or one that follows a schedule."""
    if isinstance(value, dict):
        for name in ("start", "end"):
            if value.get(name) is None:
                raise SettingError(
                    "missing", setting=f"{setting}.{name}", cure="give a schedule as {start: NUMBER, end: NUMBER}"
                )
        return parse(WeightSchedule, value, setting)
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise SettingError(
            "not a number, nor a schedule",
            setting=setting,
            value=value,
            cure="give a number, or {start: NUMBER, end: NUMBER}",
        )
    return float(value)


def optimizer_config(values: dict[str, Any], named: Collection[str] = ()) -> OptimizerConfig:
    """The group `optimizer`: learning rate and clipping, and the settings of the optimizer itself; `named` as above."""
    values = dict(values)
    flags = _take(values, OptimizerFlags)
    made = component("optimizer", values, OPTIMIZERS, kind="adamw", named=named)
    return parse(OptimizerConfig, flags | {"make": made}, "optimizer")


def schedule_config(values: dict[str, Any], named: Collection[str] = ()) -> Component:
    """The group `schedule`: the settings of what gives the learning rate over the run; `named` as above."""
    values = {name: value for name, value in values.items() if value is not None or name not in NOT_GIVEN}
    return component("schedule", values, SCHEDULES, kind="linear", named=named)


def evaluate_config(values: dict[str, Any]) -> EvaluateConfig:
    """The group `evaluate`, whose sources and measures may be classes of the user's."""
    groups = {name: group_of(f"evaluate.{name}", values.get(name, {})) for name in ("sources", "measures", "by_set")}
    sources = {name: _source(f"evaluate.sources.{name}", source) for name, source in groups["sources"].items()}
    measures = by_name("evaluate.measures", "measure", groups["measures"])
    settings = parse(EvaluateConfig, values | {"sources": sources, "measures": measures, "by_set": {}}, "evaluate")
    return settings.changed(by_set={name: _of_set(settings, name, one) for name, one in groups["by_set"].items()})


def _of_set(settings: EvaluateConfig, name: str, values: Any) -> SetConfig:
    """What is set of one evaluation set; what is not is as for all of them."""
    setting = f"evaluate.by_set.{name}"
    of_set = group_of(setting, {} if values is None else values)
    pseudo = group_of(f"{setting}.pseudo_perplexity", of_set.get("pseudo_perplexity") or {})
    of_set["pseudo_perplexity"] = {"fraction": settings.pseudo_perplexity.fraction} | pseudo
    return parse(SetConfig, {"max_sequences": settings.max_sequences} | of_set, setting)


# Groups whose settings may be those of the user's callables, and what makes them; the names are the command line's.
SECTIONS: dict[str, Callable[[Group, set[str]], Any]] = {
    "corpus": lambda values, _: corpus_config(values),
    "evaluate": lambda values, _: evaluate_config(values),
    "objective": lambda values, _: objective_config(values),
    "observers": lambda values, _: by_name("observers", "observer", values),
    "optimizer": optimizer_config,
    "schedule": schedule_config,
    "student": student_config,
    "teacher": teacher_config,
}
