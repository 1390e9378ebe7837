"""What a command line says: options and overrides, and what of them is refused before Hydra reads them."""

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from distill.config.compose import group_of
from distill.config.errors import shown
from distill.config.folders import CONF, RECIPES
from distill.config.synonyms import suggestion
from distill.runtime.errors import SettingError
from distill.runtime.nearest import did_you_mean
from distill.runtime.redaction import redact

MAIN, BASE = "main", "config"  # files of conf/: the main job, and the settings that every recipe starts from
# Where a run folder begins; of nothing it would be the folder that the user is in.
FOLDERS = ("hydra.run.dir", "hydra.sweep.dir")
READ_BY_ONE_RUN = ("hydra.run.dir", "hydra.searchpath")
HYDRA = ("hydra.", "hydra/")
SIMPLE = re.compile(r"[A-Za-z0-9_./-]+")  # a value that Hydra reads as it stands
MAX_DIGITS, MAX_DEPTH = 1000, 50  # of a value; what parses them ends in a traceback some way beyond
MAX_NAME = 200  # characters
MAX_CHARACTERS, MAX_ENTRIES = 10_000, 1000  # of an override: Hydra parses it a dozen times, long lists in squared time
NEEDED = ("corpus", "objective", "student", "teacher")  # groups of which every run has an option
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
                overrides.append(argument)
                continue
            name, separator, value = argument.partition("=")
            name = SHORT.get(name, name)
            if name in CONFIG_NAME:
                raise SettingError(f"{name} is no option: a recipe is given as {_recipe(value or next(rest, 'NAME'))}")
            if name not in OPTIONS:
                raise SettingError(
                    f"{name} is no option{suggestion(name, OPTIONS)}: settings are NAME=VALUE; --help shows the rest"
                )
            options[name] = value if separator or name not in WITH_VALUE else next(rest, "")
        folder = options.get("--config-dir")
        if folder is not None and (not folder or not Path(folder).is_dir()):
            raise SettingError(f"--config-dir {folder}: no such folder; correct the path")
        return cls(options, overrides)

    @property
    def primary(self) -> str:
        """The configuration that the overrides change: the main job where they name no recipe."""
        names = {text.lstrip("+~").partition("=")[0].partition("@")[0] for text in self.overrides}
        return BASE if "recipe" in names else MAIN

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
        from hydra.core.override_parser.overrides_parser import OverridesParser
        from hydra.errors import HydraException

        overrides, parser = [], OverridesParser.create()
        for override in self.overrides:
            try:
                overrides.append(parser.parse_override(override))
            except HydraException:
                continue
        return overrides


def run_dir(folder: Path) -> str:
    """The argument of a command that makes this its run folder, whatever signs are in the name."""
    text = str(folder).replace("${", r"\${")  # else OmegaConf would look for a setting of that name
    return f"hydra.run.dir={quoted(text)}"


def as_value(text: str) -> str:
    """A text as a value of a command line, in quotation marks where its signs need them."""
    return text if SIMPLE.fullmatch(text) else quoted(text.replace("${", r"\${"))


def quoted(text: str) -> str:
    """A text as a value of a command line, whatever signs are in it."""
    from hydra.core.override_parser.types import Quote, QuotedString

    return str(QuotedString(text, Quote.single).with_quotes())


def check_overrides(line: CommandLine) -> None:
    """Refuse what Hydra would end in a traceback, or with files where nobody looks for them.

    Raises:
        SettingError: a value that no parser takes, a group with a value that can
            name no option of it, or an empty run folder.
    """
    for override in line.overrides:
        _check_size(override)
    for override in line.parsed():
        if override.key_or_group == "recipe" and not override.is_add() and not override.is_delete():
            raise SettingError(
                f"{override.input_line}: a recipe has a plus, give {_recipe(override.input_line.partition('=')[2])}"
            )
        if override.is_delete() and (name := override.key_or_group) in NEEDED:
            raise SettingError(f"~{name} leaves a run without {name}: choose one of {', '.join(options_of(name))}")
        if override.is_sweep_override() or override.is_delete():
            continue
        name, value = override.key_or_group, override.value()
        listed = value if isinstance(value, list) else []
        if name in groups() and (
            not isinstance(value, str | list | dict) or not all(isinstance(entry, str) for entry in listed)
        ):
            raise SettingError(f"{name}={shown(value)} is no option: choose one of {', '.join(options_of(name))}")
        if name in FOLDERS and (value is None or not str(value).strip()):
            raise SettingError(f"{name}={value} is empty (a shell variable that is not set?): give a folder")
        if name == "train" and not isinstance(value, dict):
            group_of(name, value)


def _check_size(override: str) -> None:
    """Raises SettingError for numbers, lists and texts that Python's parsers cannot take, or not in seconds."""
    name = override.partition("=")[0]
    if len(name) > MAX_NAME:  # Hydra looks for a file of that name
        raise SettingError(f"{name[:80]}... is no setting: its name has {len(name):,} characters")
    if len(override) > MAX_CHARACTERS:
        raise SettingError(
            f"{name} has {len(override):,} characters, and an override has {MAX_CHARACTERS:,} at most: write the "
            "setting into a recipe"
        )
    if override.count(",") > MAX_ENTRIES:
        raise SettingError(
            f"{name} has more than {MAX_ENTRIES:,} entries: write the setting into a recipe, or name a range as in "
            "seed=range(0,2000)"
        )
    if re.search(rf"(?<!\d)\d{{{MAX_DIGITS}}}", override):
        raise SettingError(f"{name} has a number of {MAX_DIGITS:,} digits or more: no setting takes such a number")
    depth = 0
    for sign in override:
        depth += (sign in "[{(") - (sign in "]})")
        if depth > MAX_DEPTH:
            raise SettingError(f"{name} is a list in a list more than {MAX_DEPTH} deep: no setting takes such a list")


def _recipe(name: str) -> str:
    """How a recipe is given, with the nearest name where there is none of this one."""
    return f"+recipe={name}{'' if name in (recipes := options_of('recipe')) else did_you_mean(name, recipes)}"


@cache
def groups() -> set[str]:
    """The groups that have options."""
    return {folder.name for folder in CONF.iterdir() if folder.is_dir()} | {"recipe"}


def options_of(group: str) -> list[str]:
    """The options of a group, sorted."""
    folder = RECIPES if group == "recipe" else CONF / group
    return sorted(file.stem for file in folder.glob("*.yaml"))


def check_one_run(line: CommandLine) -> None:
    """Raises SettingError for what only sweeps act on."""
    for override in line.overrides:
        name = override.lstrip("+~").partition("=")[0]
        if name.startswith(HYDRA) and name not in READ_BY_ONE_RUN and override != "hydra.mode=RUN":
            raise SettingError(
                f"{name}: of Hydra's own settings one run reads {' and '.join(READ_BY_ONE_RUN)} alone; leave it out"
            )
    for parsed in line.parsed():
        if parsed.is_sweep_override():
            raise SettingError(
                f"{redact(parsed.input_line)} is several values: add --multirun for a run of each, or write a list as "
                f"{parsed.key_or_group}=[A,B]"
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
    return [str(entry) for entry in entries]
