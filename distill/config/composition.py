"""What Hydra makes of a command line: one composition, by which one run is made, or each of a sweep."""

import shlex
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from distill.config.command_line import CommandLine, check_one_run, check_overrides, options_of
from distill.config.compose import build, chain_config, default_settings, register
from distill.config.folders import CONF
from distill.config.layers import Layer, apply_overrides, layers_of, named_layers, overrides_of, take_paths
from distill.config.override_text import as_value
from distill.config.settings import ChainConfig, Config
from distill.config.written import as_yaml
from distill.runtime.errors import SettingError
from distill.runtime.files import expanded
from distill.runtime.redaction import redact


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
        take_paths(settings, self.overrides, values)
        return replace(self, settings=settings, values=values)


class ComposedRun(NamedTuple):
    """One run, and what its report says of it."""

    config: Config
    folder: Path
    recipe: str
    command: str
    resolved: str  # the settings as YAML, as they were given


def composed(arguments: list[str]) -> Config:
    """The settings of the one run that a command line names, for commands beside the main one.

    Args:
        arguments: the command line: `+recipe=NAME`, NAME=VALUE, and --config-dir FOLDER.

    Raises:
        SettingError: bad input, or a chain or a sweep, which are several runs.
    """
    composition = _one_run(CommandLine.of(arguments))
    return build(composition.settings, composition.overrides)


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
        composition = _one_run(CommandLine.of(arguments))
        return run_of(composition.with_values(values(composition.settings)))


def _one_run(line: CommandLine) -> Composition:
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


def compose(line: CommandLine) -> Composition:
    """The configuration that a command line makes; of a sweep what its runs have in common."""
    from hydra import initialize_config_dir

    register()
    path, overrides = [], []
    swept = {override.input_line for override in line.parsed() if override.is_sweep_override()}
    for override in line.parsed():
        if override.key_or_group == "hydra.searchpath":
            folders = override.value()
            if not isinstance(folders, list) or not all(isinstance(folder, str) for folder in folders):
                raise SettingError(
                    "no list of folders",
                    setting="hydra.searchpath",
                    value=override.input_line.partition("=")[2],
                    cure="give one as hydra.searchpath=[file://FOLDER]",
                )
            path += folders
    for text in line.overrides:
        if not text.startswith("hydra.searchpath=") and text not in swept:
            overrides.append(text)
    if folder := line.options.get("--config-dir"):
        path.insert(0, f"file://{Path(folder).absolute()}")
    listed = ",".join("'{}'".format(entry.replace("'", "\\'")) for entry in path)
    _refuse_hidden_recipes(path, overrides)
    try:
        with initialize_config_dir(str(CONF), version_base="1.3"):
            return compose_overrides(line.primary, [*overrides, f"hydra.searchpath=[{listed}]"])
    except RecursionError:
        raise SettingError(
            "a file of these settings has lists in lists too deep to be read", cure="correct it"
        ) from None
    except ValueError as error:
        if "integer string conversion" not in str(error):
            raise
        raise SettingError(
            "a file of these settings has a number of too many digits to be read", cure="correct it"
        ) from None


def _refuse_hidden_recipes(path: list[str], overrides: list[str]) -> None:
    """Raises SettingError where a recipe of the user's has the name of one that comes with Distill."""
    named = {text.partition("=")[2] for text in overrides if text.lstrip("+").startswith("recipe=")}
    for folder in path:
        for name in named & set(options_of("recipe")):
            if (file := Path(folder.removeprefix("file://"), "recipe", f"{name}.yaml")).is_file():
                raise SettingError(
                    f"is {file} and also a recipe that comes with Distill",
                    setting="recipe",
                    value=name,
                    cure="give yours another name",
                )


def compose_overrides(primary: str, overrides: list[str]) -> Composition:
    """The same once Hydra is set up.

    Args:
        primary: the configuration that the overrides change.
    """
    from hydra import compose as hydra_compose
    from hydra.core.hydra_config import HydraConfig
    from omegaconf import open_dict

    settings = hydra_compose(primary, overrides, return_hydra_config=True)
    HydraConfig.instance().set_config(settings)  # settings may refer to it, as ${hydra:...}
    # Read before Hydra's part is taken out: the folders refer to it.
    folder, sweep_folder = (Path(expanded(str(part.dir))) for part in (settings.hydra.run, settings.hydra.sweep))
    with open_dict(settings):
        del settings["hydra"]
    return _composition(settings, HydraConfig.get(), folder, sweep_folder)


def files_of(composition: Composition) -> list[Layer]:
    """The files of a composition in the order in which a later one wins."""
    from hydra import initialize_config_dir

    with initialize_config_dir(str(CONF), version_base="1.3"):
        layers = layers_of(composition.hydra)
    named = {layer.option for layer in named_layers(layers, composition.overrides)}
    return sorted(layers, key=lambda layer: layer.option in named)


def of_job(settings: Any) -> Composition:
    """The configuration of a run that Hydra itself has started, as it does in a sweep."""
    from hydra.core.hydra_config import HydraConfig

    job = HydraConfig.get()
    return _composition(settings, job, Path(job.runtime.output_dir), Path(job.sweep.dir))


def _composition(settings: Any, hydra: Any, folder: Path, sweep_folder: Path) -> Composition:
    overrides = overrides_of(hydra, "task")
    apply_overrides(settings, overrides, hydra)
    return Composition(settings, hydra, overrides, folder, sweep_folder)


def run_of(composition: Composition) -> ComposedRun:
    """The run that was composed."""
    config = build(composition.settings, composition.overrides, composition.values)
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
    words = [*composition.overrides, *of_program, *searched, *folder]
    return shlex.join(["python", "-m", "distill", *map(redact, words)])


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
