"""The door: what a command line says, composed once by Hydra, and refused where it can mean nothing."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from distill.config.compose import build, chain_config, group_of, register, written
from distill.config.settings import CONF, RECIPES, ChainConfig, Config
from distill.config.sweep.index import SweepIndex
from distill.config.sweep.names import swept_overrides
from distill.config.written import as_yaml, without_environment
from distill.runtime.errors import SettingError
from distill.runtime.nearest import did_you_mean
from distill.runtime.redaction import redact, secret_given, secrets_in

MAIN, BASE = "main", "config"  # files of conf/: the main job, and the settings that every recipe starts from
SAYS_WHAT = ("recipe", "scale")  # a command line that has neither is the main job
# Where a run folder begins; of nothing it would be the folder that the user is in.
FOLDERS = ("hydra.run.dir", "hydra.sweep.dir")
READ_BY_ONE_RUN = ("hydra.run.dir", "hydra.searchpath")
HYDRA = ("hydra.", "hydra/")
BASIC = "basic"  # Hydra's own sweeper
SHORT = {"-c": "--cfg", "-cd": "--config-dir", "-m": "--multirun", "-i": "--info", "-p": "--package"}
WITH_VALUE = ("--cfg", "--config-dir", "--package")
SHOWING = ("--cfg", "--info", "--hydra-help")  # Hydra prints something, and nothing runs
OPTIONS = (*WITH_VALUE, *SHOWING, "--resolve", "--multirun")


@dataclass(frozen=True)
class CommandLine:
    """The arguments of a command: options by their long names, and overrides."""

    options: dict[str, str]
    overrides: list[str]

    @classmethod
    def of(cls, arguments: list[str]) -> "CommandLine":
        """Raises SettingError for an option that there is not, or a folder of recipes that is not there."""
        options, overrides, rest = dict[str, str](), list[str](), iter(arguments)
        for argument in rest:
            if not argument.startswith("-"):
                overrides.append(argument)
                continue
            name, separator, value = argument.partition("=")
            name = SHORT.get(name, name)
            if name not in OPTIONS:
                raise SettingError(
                    f"{name} is no option{did_you_mean(name, OPTIONS)}: settings are NAME=VALUE; --help shows the rest"
                )
            options[name] = value if separator or name not in WITH_VALUE else next(rest, "")
        folder = options.get("--config-dir")
        if folder is not None and not Path(folder).is_dir():
            raise SettingError(f"--config-dir {folder}: no such folder; correct the path")
        return cls(options, overrides)

    @property
    def primary(self) -> str:
        """The configuration that the overrides change."""
        names = {each.lstrip("+~").partition("=")[0].partition("@")[0] for each in self.overrides}
        return BASE if names.intersection(SAYS_WHAT) else MAIN

    @property
    def shows(self) -> bool:
        """Whether Hydra is asked to print something, and nothing runs."""
        return any(name in self.options for name in SHOWING)

    @property
    def own(self) -> list[str]:
        """The overrides without those of Hydra's own part."""
        return [each for each in self.overrides if not each.lstrip("+~").startswith(HYDRA)]

    @property
    def config_dir(self) -> list[str]:
        """The option that names a folder of the user's recipes, for another command."""
        folder = self.options.get("--config-dir")
        return [] if folder is None else ["--config-dir", folder]

    def parsed(self) -> list[Any]:
        """The overrides as Hydra reads them; those that are none are left for Hydra to refuse."""
        from hydra.core.override_parser.overrides_parser import OverridesParser
        from hydra.errors import HydraException

        found, parser = [], OverridesParser.create()
        for override in self.overrides:
            try:
                found.append(parser.parse_override(override))
            except HydraException:
                continue
        return found


@dataclass(frozen=True)
class Composed:
    """What Hydra makes of a command line: the settings, and its own part."""

    settings: Any
    hydra: Any
    overrides: list[str]  # those of the settings
    folder: Path  # of the run

    @property
    def sweeps(self) -> bool:
        """Whether a recipe, or hydra.mode on the command line, makes this a sweep."""
        return "MULTIRUN" in str(self.hydra.get("mode"))

    @property
    def recipe(self) -> str:
        return str(self.hydra.runtime.choices.get("recipe") or "default")

    @property
    def chain(self) -> ChainConfig | None:
        """The chain that the recipe names; None where it names one run."""
        return chain_config(self.settings, self.overrides)


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
    found = _one_run(CommandLine.of(arguments))
    return build(found.settings, found.overrides)


def composed_run(arguments: list[str]) -> ComposedRun:
    """The one run that a command line names, for programs that run it themselves.

    What Hydra keeps for the whole process, such as the configuration of a program that uses it too, is as before
    afterwards.

    Args:
        arguments: as `composed` takes them, and hydra.run.dir, the folder of the run.

    Raises:
        SettingError: bad input, several runs, or a part of Hydra that only the command has.
    """
    with hydra_as_before():
        return run_of(_one_run(CommandLine.of(arguments)))


def _one_run(line: CommandLine) -> Composed:
    if others := [name for name in line.options if name not in ("--config-dir", "--multirun")]:
        raise SettingError(f"{others[0]} is an option of the command: run `python -m distill` with it, or leave it out")
    check_overrides(line)
    found = compose(line)
    if "--multirun" in line.options or found.sweeps or any(each.is_sweep_override() for each in line.parsed()):
        raise SettingError(
            "this command is about one run: leave --multirun, lists of several values and recipes of sweeps out"
        )
    check_one_run(line)
    if found.settings.get("chain") is not None:
        raise SettingError("this recipe is a chain, which is several runs: name the recipe of one of its stages")
    return found


def compose(line: CommandLine) -> Composed:
    """The configuration that a command line makes; of a sweep what its runs have in common."""
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.core.hydra_config import HydraConfig
    from omegaconf import OmegaConf

    register()
    path, overrides = [], []
    swept = {each.input_line for each in line.parsed() if each.is_sweep_override()}
    for override in line.parsed():
        if override.key_or_group == "hydra.searchpath":
            path += override.value()
    for text in line.overrides:
        if not text.startswith("hydra.searchpath=") and text not in swept:
            overrides.append(text)
    if folder := line.options.get("--config-dir"):
        path.insert(0, f"file://{Path(folder).absolute()}")
    listed = ",".join("'{}'".format(each.replace("'", "\\'")) for each in path)
    with initialize_config_dir(str(CONF), version_base="1.3"):
        settings = hydra_compose(line.primary, [*overrides, f"hydra.searchpath=[{listed}]"], return_hydra_config=True)
    HydraConfig.instance().set_config(settings)  # settings may refer to it, as ${hydra:...}
    own = OmegaConf.masked_copy(settings, [str(name) for name in settings if name != "hydra"])
    return Composed(own, HydraConfig.get(), line.own, Path(str(settings.hydra.run.dir)))


def run_of(found: Composed) -> ComposedRun:
    """The run that was composed."""
    config = build(found.settings, found.overrides)
    command = " ".join(["python -m distill", *map(redact, found.overrides)])
    return ComposedRun(config, found.folder, found.recipe, command, as_yaml(config.given))


def by_hydra(line: CommandLine, run: Callable[[Composed], float | None]) -> None:
    """Let Hydra read the command line of this process: it shows what is asked for, or calls `run` for each of a sweep.

    Raises:
        SettingError: of Hydra, in its own classes, and what `run` raises.
    """
    import hydra
    from hydra.core.hydra_config import HydraConfig

    def task(settings: Any) -> float | None:
        job = HydraConfig.get()
        return run(Composed(settings, job, list(job.overrides.task), Path(job.runtime.output_dir)))

    register()
    name_sweep_folders(line)
    os.environ["HYDRA_FULL_ERROR"] = "1"  # let errors through, which get one line
    hydra.main(version_base="1.3", config_path=str(CONF), config_name=line.primary)(task)()


def fixed_overrides(line: CommandLine, hydra: Any) -> set[str]:
    """The names of the overrides that are the same in all runs of a sweep, as Hydra writes them: `+recipe`.

    Args:
        hydra: its own configuration, with the overrides of its sweeper besides those of the command line.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from omegaconf import OmegaConf

    sweeper = OmegaConf.to_container(hydra.sweeper)
    assert isinstance(sweeper, dict)
    params = [f"{name}={value}" for name, value in (sweeper.get("params") or {}).items()]
    is_swept = {
        each.get_key_element(): each.is_sweep_override()
        for each in [*OverridesParser.create().parse_overrides(params), *line.parsed()]
    }  # of a name that comes twice the last one holds
    return {name for name, swept in is_swept.items() if not swept}


def name_sweep_folders(line: CommandLine) -> None:
    """Let Hydra name the folders of a sweep's runs by what is swept: the value of `${sweep_folder:}`."""
    from hydra.core.hydra_config import HydraConfig
    from omegaconf import OmegaConf

    def folder() -> str:
        job = HydraConfig.get()
        if OmegaConf.is_missing(job.job, "num"):  # the configuration is only shown
            return "NAME=VALUE"
        swept = swept_overrides(job.overrides.task, fixed_overrides(line, job))
        return SweepIndex(Path(job.sweep.dir)).folder_of(swept, numbered=sweeper_of(job) != BASIC)

    OmegaConf.register_new_resolver("sweep_folder", folder, replace=True)


def sweeper_of(hydra: Any) -> str:
    """The option of hydra/sweeper; Hydra's own is basic, and runs every value that is given."""
    return str(hydra.runtime.choices.get("hydra/sweeper"))


def run_dir(folder: Path) -> str:
    """The argument of a command that makes this its run folder, whatever signs are in the name."""
    from hydra.core.override_parser.types import Quote, QuotedString

    text = str(folder).replace("${", r"\${")  # else OmegaConf would look for a setting of that name
    return f"hydra.run.dir={QuotedString(text, Quote.single).with_quotes()}"


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


def check_overrides(line: CommandLine) -> None:
    """Refuse what Hydra would end in a traceback, or with files where nobody looks for them, and secrets.

    Raises:
        SettingError: a secret that stands there itself, a group with a value that can name no option of it, or an empty
            run folder.
    """
    for override in line.overrides:
        if (secret := secret_given(override)) is not None:
            raise SettingError(
                f"{secret} is named like a secret, and everybody on this machine can read the command line: set a "
                f"variable and give {secret}='${{oc.env:NAME}}'"
            )
    groups = {each.name for each in CONF.iterdir() if each.is_dir()} | {"recipe"}
    for override in line.parsed():
        if override.is_sweep_override() or override.is_delete():
            continue
        name, value = override.key_or_group, override.value()
        listed = value if isinstance(value, list) else []
        if name in groups and (
            not isinstance(value, str | list | dict) or not all(isinstance(each, str) for each in listed)
        ):
            raise SettingError(f"{name}={written(value)} is no option: choose one of {', '.join(options_of(name))}")
        if name in FOLDERS and (value is None or not str(value).strip()):
            raise SettingError(f"{name}={value} is empty (a shell variable that is not set?): give a folder")
        if name == "train" and not isinstance(value, dict):
            group_of(name, value)


def options_of(group: str) -> list[str]:
    """The options of a group, sorted."""
    folder = RECIPES if group == "recipe" else CONF / group
    return sorted(file.stem for file in folder.glob("*.yaml"))


def check_one_run(line: CommandLine) -> None:
    """Raises SettingError for what only sweeps act on."""
    for override in line.overrides:
        name = override.lstrip("+~").partition("=")[0]
        if name.startswith(HYDRA) and name not in READ_BY_ONE_RUN:
            raise SettingError(
                f"{name}: of Hydra's own settings one run reads {' and '.join(READ_BY_ONE_RUN)} alone; leave it out"
            )
    for each in line.parsed():
        if each.is_sweep_override():
            raise SettingError(
                f"{redact(each.input_line)} is several values: add --multirun for a run of each, or write a list as "
                f"{each.key_or_group}=[A,B]"
            )


def check_sweep(found: Composed) -> None:
    """Look at a sweep before its first run.

    Raises:
        SettingError: a recipe holds a secret, which Hydra would write into a file of its own, or the sweeper needs a
            number of each run and no `optimize` names one.
    """
    if secret := next(secrets_in(without_environment(found.settings)), None):
        raise SettingError(
            f"{secret} is named like a secret, which Hydra would write into a file of the sweep: write "
            f"{secret.rpartition('.')[2]}: ${{oc.env:NAME}} into the recipe and set that variable"
        )
    if sweeper_of(found.hydra) != BASIC and found.settings.get("optimize") is None:
        raise SettingError(
            f"optimize=null, but the sweeper {sweeper_of(found.hydra)} chooses by a number of each run: set "
            "optimize=perplexity, or another number of the results"
        )


def read_list(name: str, value: str) -> list[str]:
    """The entries of [A,B], as Hydra reads it. Raises SettingError where it is none."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        entries = OverridesParser.create().parse_override(f"{name}={value}").value()
    except HydraException:
        entries = None
    if not isinstance(entries, list):
        raise SettingError(f"{name}={value} is no list: write {name}=[A,B], or {name}=A {name}=B")
    return [str(each) for each in entries]
