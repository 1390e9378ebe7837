"""What Hydra makes of a command line, and the typed settings of the run that it describes.

Behind `build` there is no OmegaConf. Hydra is imported inside the functions that need it, so that processes which only
read settings start quickly.
"""

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from distill.config import CONF, RECIPES
from distill.config.base import flatten
from distill.config.command_line import BASE, CommandLine, check_one_run, check_overrides
from distill.config.component import TARGET
from distill.config.data import SourceConfig
from distill.config.errors import explain, group_of_settings, parse, shown
from distill.config.override_text import as_value, parse_override, quoted
from distill.config.settings import ChainConfig, Config
from distill.config.written import as_yaml, without_environment, written_and_compared
from distill.runtime.errors import SettingError
from distill.runtime.files import expanded
from distill.runtime.redaction import redact

WHOLE = ("written", "compared")  # of Config: all settings together
CHAIN = ("chain.", "recipe", "hydra.")  # how the settings of a chain begin


@cache
def register() -> None:
    """Make the schema and the recipes known to Hydra, which finds `recipes/x.yaml` as `recipe/x` in no other way."""
    from hydra.core.config_store import ConfigStore
    from omegaconf import OmegaConf

    store = ConfigStore.instance()
    store.store(name="schema", node=_schema())
    for file in RECIPES.glob("*.yaml"):
        store.store(group="recipe", name=file.stem, node=OmegaConf.load(file), package="_global_")


def _schema() -> Any:
    """The defaults of every setting, whose sections take further names: pydantic refuses those that there are not."""
    from omegaconf import OmegaConf

    schema = Config().model_dump(mode="json", by_alias=True, fallback=str, exclude=set(WHOLE))
    for section in ("corpus", "teacher", "student", "optimizer", "schedule"):
        for name in (TARGET, "kind"):  # which the options of the group set
            schema[section].pop(name, None)
    # null: the source's own default, which may be that of a class of the user's
    fields = [name for name in SourceConfig.model_fields if name not in ("target", "group", "kind")]
    schema["corpus"] |= dict.fromkeys(fields)
    created = OmegaConf.create(schema)
    for name, section in schema.items():
        if isinstance(section, dict):
            OmegaConf.set_struct(created[name], False)
    return created


@cache
def default_settings() -> dict[str, Any]:
    """The defaults of every setting by its dotted name on the command line, options of groups aside."""
    from omegaconf import OmegaConf

    schema = OmegaConf.to_container(_schema())
    assert isinstance(schema, dict)
    return flatten({str(name): section for name, section in schema.items()})


@dataclass(frozen=True)
class Composition:
    """What Hydra makes of a command line: the settings, and its own part."""

    settings: Any
    hydra: Any
    overrides: list[str]  # those of the settings
    folder: Path  # of the run
    sweep_folder: Path  # of a sweep of such runs
    values: Mapping[str, Any] = field(default_factory=dict)  # of a program, by the dotted names of settings

    @property
    def sweeps(self) -> bool:
        """Whether a recipe, or hydra.mode on the command line, makes this a sweep."""
        return "MULTIRUN" in str(self.hydra.get("mode"))

    @property
    def folder_has_time(self) -> bool:
        """Whether the name of the run folder holds the time, so that it is another one when it is composed again."""
        from omegaconf import OmegaConf

        return "${now" in str(OmegaConf.to_container(self.hydra.run, resolve=False))

    @property
    def recipe(self) -> str:
        return str(self.hydra.runtime.choices.get("recipe") or "default")

    @property
    def chain(self) -> ChainConfig | None:
        """The chain that the recipe names; None where it names one run."""
        return chain_config(self.settings, self.overrides)

    def with_values(self, values: Mapping[str, Any]) -> "Composition":
        """The same with values of a program, which win over all others.

        Args:
            values: by the dotted names of settings: plain ones, and `InMemory` in place of an import path.
        """
        from omegaconf import OmegaConf

        settings = OmegaConf.create(self.settings, flags={"allow_objects": True, "struct": False})
        for name, value in values.items():
            OmegaConf.update(settings, name, value, merge=False)
        return replace(self, settings=settings, values=values)


class ComposedRun(NamedTuple):
    """One run, and what its report says of it."""

    config: Config
    folder: Path
    recipe: str
    command: str
    resolved: str  # the settings as YAML, as they were given


def compose(line: CommandLine) -> Composition:
    """The configuration that a command line makes; of a sweep what its runs have in common."""
    from hydra import initialize_config_dir

    register()
    overrides = []
    for text, override in zip(line.overrides, map(parse_override, line.overrides), strict=True):
        if override is None or not override.is_sweep_override():
            overrides.append(text)
        elif override.key_or_group == "recipe":  # the runs have none in common, and a folder that is no recipe's
            overrides.append("~recipe")
    if folder := line.options.get("--config-dir"):
        overrides.append(f"hydra.searchpath=[{quoted(f'file://{Path(folder).absolute()}')}]")
    with initialize_config_dir(str(CONF), version_base="1.3"):
        composition = compose_overrides(overrides)
    _refuse_hidden_recipe(composition)
    return composition


def _refuse_hidden_recipe(composition: Composition) -> None:
    """Raises SettingError where a recipe of the user's has the name of one that comes with Distill."""
    name = f"{composition.recipe}.yaml"
    for source in composition.hydra.runtime.config_sources if (RECIPES / name).is_file() else ():
        if source.schema == "file" and (file := Path(source.path, "recipe", name)).is_file():
            problem, cure = f"is {file} and also a recipe that comes with Distill", "give yours another name"
            raise SettingError(problem, setting="recipe", value=composition.recipe, cure=cure)


def compose_overrides(overrides: list[str]) -> Composition:
    """The same once Hydra is set up."""
    from hydra import compose as hydra_compose
    from hydra.core.hydra_config import HydraConfig
    from omegaconf import open_dict

    settings = hydra_compose(BASE, overrides, return_hydra_config=True)
    HydraConfig.instance().set_config(settings)  # settings may refer to it, as ${hydra:...}
    # Read before Hydra's part is taken out: the folders refer to it.
    folder, sweep_folder = (Path(expanded(str(part.dir))) for part in (settings.hydra.run, settings.hydra.sweep))
    with open_dict(settings):
        del settings["hydra"]
    hydra = HydraConfig.get()
    return Composition(settings, hydra, overrides_of(hydra, "task"), folder, sweep_folder)


def of_job(settings: Any) -> Composition:
    """The configuration of a run that Hydra itself has started, as it does in a sweep."""
    from hydra.core.hydra_config import HydraConfig

    job = HydraConfig.get()
    folder, sweep_folder = Path(job.runtime.output_dir), Path(job.sweep.dir)
    return Composition(settings, job, overrides_of(job, "task"), folder, sweep_folder)


def overrides_of(hydra: Any, part: str) -> list[str]:
    """The overrides of the settings, `task`, or of Hydra itself, as they were given: nothing in them is resolved.

    Args:
        hydra: its own part of the composition.
    """
    from omegaconf import OmegaConf

    return [str(override) for override in OmegaConf.to_container(hydra.overrides[part], resolve=False) or []]


def settings_of(composition: Composition) -> Config:
    """The typed settings of a composition. Raises SettingError where they cannot be, or a recipe undoes an option."""
    _refuse_options_without_effect(composition)
    config = build(composition.settings, composition.overrides, composition.values)
    # A misspelt argument ends the command here, and not when all that a run needs has been imported.
    terms = [config.objective.component(name) for name in config.objective.terms]
    for make in (config.optimizer.make, config.schedule.make, *terms):
        if make.path.startswith("distill."):
            make.refuse_unknown()
    return config


def _refuse_options_without_effect(composition: Composition) -> None:
    """Refuse a teacher, or an objective without some losses, that the command line chooses and a recipe undoes.

    Values of a recipe win over options of groups: the run would learn from another teacher than the one that is asked
    for, or its baseline from a teacher.

    Raises:
        SettingError: it names the value that the command line has to give.
    """
    from omegaconf import OmegaConf

    given = [override.lstrip("+").partition("=") for override in composition.overrides]
    names = {name for name, _, _ in given} | {*composition.values}
    choices = composition.hydra.runtime.choices
    wanted = dict[str, Any]()
    chosen = {name for name, _, value in given if not value.startswith("{")}
    if "teacher" in chosen and (path := _option("teacher", choices["teacher"]).get("path", "???")) != "???":
        wanted["teacher.path"] = path
    if "objective" in chosen:
        option = _option("objective", choices["objective"])
        weights = {name: OmegaConf.select(option, f"{name}.weight") for name in option}
        wanted |= {f"objective.{name}.weight": 0.0 for name, weight in weights.items() if weight == 0}
    for name, value in wanted.items():
        found, group = OmegaConf.select(composition.settings, name, throw_on_missing=False), name.partition(".")[0]
        if name not in names and found not in (None, "???", value):
            problem = f"the recipe sets {name}={found}, and its values win over options of groups"
            raise SettingError(problem, setting=group, value=choices[group], cure=f"give {name}={shown(value)}")


def _option(group: str, name: str) -> Any:
    """The values of an option of this package with those of the options that it begins from; none of any other."""
    from omegaconf import OmegaConf

    file = CONF / group / f"{name}.yaml"
    content: Any = OmegaConf.load(file) if file.is_file() else OmegaConf.create()
    return OmegaConf.merge(*(_option(group, parent) for parent in content.pop("defaults", [])), content)


def run_of(composition: Composition) -> ComposedRun:
    """The run that was composed."""
    config = settings_of(composition)
    return ComposedRun(config, composition.folder, composition.recipe, _command(composition), as_yaml(config.written))


def _command(composition: Composition) -> str:
    """The command of a run for a shell, which resumes this very run where it is given in the same working folder."""
    of_hydra = overrides_of(composition.hydra, "hydra")
    signs = {name: "" if name in default_settings() else "++" for name in composition.values}
    of_program = [f"{signs[name]}{name}={as_value(value)}" for name, value in composition.values.items()]
    searched = [text for text in of_hydra if text.startswith("hydra.searchpath=") and not text.endswith("=[]")]
    names = {text.partition("=")[0] for text in of_hydra}
    is_named = composition.sweeps or "hydra.run.dir" in names
    folder = [f"hydra.run.dir={as_value(str(composition.folder))}"] if is_named else []
    folder += ["hydra.mode=RUN"] * composition.sweeps  # of a recipe that searches
    words = [f"+{text}" if text.startswith("recipe=") else text for text in composition.overrides]
    return shlex.join(["python", "-m", "distill", *map(redact, [*words, *of_program, *searched, *folder])])


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
    config = parse(Config, values | {"written": written, "compared": compared}, "")
    names = {override.partition("=")[0].lstrip("+") for override in overrides} | {*(given or {})}
    config.train.refuse_unread({name.removeprefix("train.") for name in names if name.startswith("train.")})
    return config


def chain_config(composed: Any, overrides: list[str]) -> ChainConfig | None:
    """The chain that a recipe names; None where it names one job.

    Raises:
        SettingError: settings besides those of the chain, which no stage would read.
    """
    from omegaconf.errors import OmegaConfBaseException

    if composed.get("chain") is None:
        return None
    if others := [override for override in overrides if not override.lstrip("+~").startswith(CHAIN)]:
        raise SettingError(
            "this recipe is a chain, whose stages have settings of their own",
            setting=others[0].partition("=")[0],
            value=others[0].partition("=")[2],
            cure="give chain.given.NAME, or write it into chain.stages.NAME.settings",
        )
    try:
        # A variable's value would stand on the command line of the stage, for everybody on this machine to read.
        values = without_environment(composed)["chain"]
    except OmegaConfBaseException as error:
        raise explain(error) from error
    if not isinstance(values, dict):
        raise group_of_settings("chain", values)
    if left_open := [name for name, value in flatten(values).items() if value == "???"]:
        raise SettingError("missing", setting=f"chain.{left_open[0]}", cure="give it a value")
    return parse(ChainConfig, {name: value for name, value in values.items() if name != "given"}, "chain")


def composed(arguments: list[str]) -> Config:
    """The settings of the one run that a command line names, for commands beside the main one.

    Args:
        arguments: the command line: `+recipe=NAME`, NAME=VALUE, and --config-dir FOLDER.

    Raises:
        SettingError: bad input, or a chain or a sweep, which are several runs.
    """
    return settings_of(compose_one(CommandLine.of(arguments)))


def composed_run(
    arguments: list[str], values: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda _: {}
) -> ComposedRun:
    """The one run that a command line names, for programs that run it themselves.

    What Hydra keeps for the whole process, such as the configuration of a program that uses it too, is as before
    afterwards.

    Args:
        arguments: as `composed` takes them, and hydra.run.dir, the folder of the run.
        values: gets the settings that these make, and gives those of the program, as `Composition.with_values`
            takes them.

    Raises:
        SettingError: bad input, several runs, or a part of Hydra that only the command has.
    """
    with hydra_as_before():
        composition = compose_one(CommandLine.of(arguments))
        return run_of(composition.with_values(values(composition.settings)))


def compose_one(line: CommandLine) -> Composition:
    """`compose` of a command line that has to be about one run."""
    if options := [name for name in line.options if name not in ("--config-dir", "--multirun")]:
        raise SettingError(
            "is an option of the command", setting=options[0], cure="run `python -m distill` with it, or leave it out"
        )
    check_overrides(line)
    composition = compose(line)
    if "--multirun" in line.options or composition.sweeps:
        raise SettingError("this command is about one run", cure="leave --multirun and recipes of sweeps out")
    check_one_run(line, may_sweep=False)
    if composition.settings.get("chain") is not None:
        raise SettingError("this recipe is a chain, which is several runs", cure="name the recipe of one of its stages")
    return composition


@contextmanager
def hydra_as_before() -> Iterator[None]:
    """Within it Hydra is as if nothing had used it; afterwards it is as the program around has left it."""
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.hydra_config import HydraConfig

    states = GlobalHydra.instance(), HydraConfig.instance()
    before = states[0].hydra, states[1].cfg
    states[0].clear()
    try:
        yield
    finally:
        GlobalHydra.set_instance(states[0])  # what composes has put a copy in its place
        states[0].hydra, states[1].cfg = before
