"""What a command line says: options and overrides, and what of them is refused before Hydra reads them."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from distill.config import CONF, RECIPES
from distill.config.errors import group_of_settings, shown
from distill.config.override_text import FOLDERS, in_shell, is_text, parse_override, quoted, understood
from distill.config.synonyms import suggestion
from distill.runtime.errors import SettingError, did_you_mean
from distill.runtime.files import expanded
from distill.runtime.redaction import redact

BASE = "config"  # the file of conf/ that every run starts from
READ_BY_ONE_RUN = ("hydra.run.dir", "hydra.searchpath")
HYDRA = ("hydra.", "hydra/")
MAX_NAME = 200  # characters: Hydra looks for a file of that name
MAX_CHARACTERS, MAX_ENTRIES = 10_000, 1000  # of an override: Hydra parses long lists in squared time and memory
NEEDED = ("corpus", "objective", "student", "teacher")  # groups of which every run has an option
# Groups of which a run has one option; those of other groups add to each other.
ONE_OPTION = ("corpus", "student", "teacher", "optimizer", "schedule", "backend", "tracker", "profile")
SHORT = {"-c": "--cfg", "-cd": "--config-dir", "-m": "--multirun", "-i": "--info", "-p": "--package"}
WITH_VALUE = ("--cfg", "--config-dir", "--package")
SHOWING = ("--cfg", "--info", "--hydra-help")  # Hydra prints something, and nothing runs
CONFIG_NAME = ("-cn", "--config-name")  # of Hydra, which has no recipes
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
                _check_size(argument)
                overrides.append(argument)
                continue
            name, separator, value = argument.partition("=")
            name = SHORT.get(name, name)
            if name in CONFIG_NAME:
                recipe = _recipe(value or next(rest, "NAME"), options)
                raise SettingError(f"{name} is no option", cure=f"a recipe is given as {recipe}")
            if name not in OPTIONS:
                raise SettingError(
                    f"no option{suggestion(name, OPTIONS)}: settings are NAME=VALUE",
                    setting=name,
                    cure="--help shows the rest",
                )
            options[name] = value if separator or name not in WITH_VALUE else next(rest, "")
        if (folder := options.get("--config-dir")) is not None:
            options["--config-dir"] = folder = expanded(folder)
            if not folder or not Path(folder).is_dir():
                raise SettingError(f"--config-dir {folder}: no such folder", cure="correct the path")
            if any(override.startswith("hydra.searchpath=") for override in overrides):
                cure = f"give all folders as hydra.searchpath=[file://{folder},...]"
                raise SettingError("beside --config-dir", setting="hydra.searchpath", cure=cure)
        return cls(options, [understood(override, "--multirun" in options) for override in overrides])

    @property
    def arguments(self) -> list[str]:
        """The command line again, as Hydra reads it."""
        options = [[name, value] if name in WITH_VALUE else [name] for name, value in self.options.items()]
        return [*(word for option in options for word in option), *self.overrides]

    @property
    def shows(self) -> bool:
        """Whether Hydra is asked to print something, and nothing runs."""
        return any(name in self.options for name in SHOWING)

    @property
    def config_dir(self) -> list[str]:
        """The option that names a folder of the user's recipes, for another command."""
        folder = self.options.get("--config-dir")
        return [] if folder is None else ["--config-dir", folder]

    def parsed(self) -> list[Any]:
        """The overrides as Hydra reads them; those that are none are left for Hydra to refuse."""
        return [parsed for override in self.overrides if (parsed := parse_override(override)) is not None]


def run_dir(folder: Path) -> str:
    """The argument of a command that makes this its run folder, whatever signs are in the name."""
    text = str(folder).replace("${", r"\${")  # else OmegaConf would look for a setting of that name
    return f"hydra.run.dir={quoted(text)}"


def check_overrides(line: CommandLine) -> None:
    """Refuse what Hydra would end in a traceback, or with files where nobody looks for them.

    Raises:
        SettingError: a group without an option or with several, or an empty run folder.
    """
    for override in line.parsed():
        name = override.key_or_group
        if override.is_delete() and name in NEEDED:
            cure = f"choose one of {', '.join(options_of(name))}"
            raise SettingError(f"~{name} leaves a run without {name}", cure=cure)
        if override.is_sweep_override() or override.is_delete():
            continue
        value = override.value()
        listed = value if isinstance(value, list) else [value]
        if name in groups() and not isinstance(value, dict):
            several = len(listed) > 1 and name in ONE_OPTION
            if several or not all(isinstance(entry, str) for entry in listed):
                problem, cure = "not one option", f"choose one of {', '.join(options_of(name))}"
                raise SettingError(problem, setting=name, value=shown(value), cure=cure)
        if name in FOLDERS and not str(value or "").strip():
            problem = "empty (a shell variable that is not set?)"
            raise SettingError(problem, setting=name, value=value, cure="give a folder")
        if name == "train" and not isinstance(value, dict):
            raise group_of_settings(name, value)


def _check_size(override: str) -> None:
    """Raises SettingError for an override that Hydra would not read in seconds."""
    name = override.partition("=")[0]
    if len(name) > MAX_NAME:
        raise SettingError(f"{name[:80]}... is no setting, as its name has {len(name):,} characters", cure="correct it")
    cure = "write the setting into a recipe, or name a range as in seed=range(0,2000)"
    if len(override) > MAX_CHARACTERS:
        problem = f"has {len(override):,} characters, and an override has {MAX_CHARACTERS:,} at most"
        raise SettingError(problem, setting=name, cure=cure)
    if override.count(",") > MAX_ENTRIES:
        raise SettingError(f"has more than {MAX_ENTRIES:,} entries", setting=name, cure=cure)


def _recipe(name: str, options: dict[str, str]) -> str:
    """How a recipe is given, with the nearest name where there is none of this one."""
    recipes = options_of("recipe", options.get("--config-dir"))
    return f"+recipe={name}{'' if name in recipes else did_you_mean(name, recipes)}"


@cache
def groups() -> set[str]:
    """The groups that have options."""
    return {folder.name for folder in CONF.iterdir() if folder.is_dir()} | {"recipe"}


def options_of(group: str, config_dir: str | None = None) -> list[str]:
    """The options of a group, sorted; with those of a folder of the user's."""
    folders = [RECIPES if group == "recipe" else CONF / group]
    if config_dir is not None:
        folders.append(Path(config_dir) / group)
    return sorted({file.stem for folder in folders for file in folder.glob("*.yaml")})


def check_one_run(line: CommandLine, may_sweep: bool = True) -> None:
    """Raises SettingError for what only sweeps act on; `may_sweep`: whether this command can be a sweep."""
    for override in line.overrides:
        name = override.lstrip("+~").partition("=")[0]
        if name.startswith(HYDRA) and name not in READ_BY_ONE_RUN and override != "hydra.mode=RUN":
            raise SettingError(
                f"of Hydra's own settings one run reads {' and '.join(READ_BY_ONE_RUN)} alone",
                setting=name,
                cure="leave it out",
            )
    for parsed in line.parsed():
        if parsed.is_sweep_override():
            raise _several_values(parsed.input_line, may_sweep)


def _several_values(override: str, may_sweep: bool) -> SettingError:
    """For one that names a run for each of its values, where there is one run."""
    name, _, value = redact(override).partition("=")
    other = f"give one text such as {in_shell(name, value)}" if is_text(name) else f"write a list as {name}=[A,B]"
    cure = f"add --multirun for a run of each, or {other}" if may_sweep else f"give one value, or {other}"
    return SettingError("several values", setting=name.lstrip("+"), value=value, cure=cure)


def read_list(name: str, value: str) -> list[str]:
    """The entries of [A,B], as Hydra reads it. Raises SettingError where it is none."""
    parsed = parse_override(understood(f"entries={value}", multirun=False))  # a setting of this name may be a text
    entries = None if parsed is None else parsed.value()
    if not isinstance(entries, list):
        raise SettingError("no list", setting=name, value=value, cure=f"write {name}=[A,B], or {name}=A {name}=B")
    return [str(entry) for entry in entries]
