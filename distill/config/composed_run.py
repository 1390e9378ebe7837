"""One run as a command line names it, for programs and notebooks that run it themselves."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from distill.config.command_line import checked, compose_settings, composed, own_overrides
from distill.config.compose import build, register
from distill.config.settings import Config
from distill.runtime.errors import SettingError
from distill.runtime.redaction import masked, redact_override

# What of Hydra's own settings a program may give that runs one job itself.
PROGRAM = ("hydra.run.dir", "hydra.searchpath")


class ComposedRun(NamedTuple):
    """One run as `python -m distill` would have it, and what its report says of it."""

    config: Config
    folder: Path
    recipe: str
    command: str
    resolved: str  # the settings as YAML


def composed_run(arguments: list[str]) -> ComposedRun:
    """The one run that a command line names, for programs that run it themselves.

    What Hydra keeps for the whole process, such as the configuration of a program that uses it too, is as before
    afterwards.

    Args:
        arguments: as `composed` takes them, and hydra.run.dir, the folder of the run.

    Raises:
        SettingError: bad input, several runs, or a part of Hydra that only the command has.
    """
    from hydra.core.hydra_config import HydraConfig

    _check_for_program(arguments)
    with hydra_as_before():
        register()
        arguments = checked(arguments)
        settings = compose_settings(arguments, hydra=True)
        HydraConfig.instance().set_config(settings)  # settings may refer to it, as ${hydra:...}
        return _described(composed(arguments), settings, own_overrides(arguments))


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
    states[0].hydra = None
    try:
        yield
    finally:
        GlobalHydra.set_instance(states[0])  # what composes has put a copy in its place
        states[0].hydra, states[1].cfg = before


def _check_for_program(arguments: list[str]) -> None:
    """Raises SettingError for options of the command and parts of Hydra that nothing but the command acts on."""
    rest = iter(arguments)
    for argument in rest:
        if argument in ("--config-dir", "-cd"):
            next(rest, None)
        elif argument.startswith("-") and not argument.startswith("--config-dir="):
            raise SettingError(
                f"{argument} is an option of the command: run `python -m distill` with it, or leave it out"
            )
        elif (name := argument.lstrip("+~").partition("=")[0]).startswith(("hydra.", "hydra/")) and name not in PROGRAM:
            raise SettingError(
                f"{name}: of Hydra's own settings only {' and '.join(PROGRAM)} are read here; leave it out"
            )


def _described(config: Config, settings: Any, overrides: list[str]) -> ComposedRun:
    from omegaconf import OmegaConf, open_dict

    folder, recipe = Path(str(settings.hydra.run.dir)), settings.hydra.runtime.choices.get("recipe") or "default"
    with open_dict(settings):
        del settings["hydra"]
    build(settings, overrides)  # which replaces whole dicts in place
    plain = masked(OmegaConf.to_container(settings, resolve=True))
    command = " ".join(["python -m distill", *map(redact_override, overrides)])
    return ComposedRun(config, folder, str(recipe), command, OmegaConf.to_yaml(OmegaConf.create(plain)))
