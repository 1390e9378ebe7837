"""Looks at the command line before Hydra does: for values that name nothing, and for code that is not trusted."""

from itertools import pairwise
from pathlib import Path

from distill.compose import group_of, written
from distill.config import CONF, RECIPES
from distill.errors import SettingError
from distill.trust import refuse_targets

# Where Hydra begins a run folder; of nothing it would make the folder that the user is in.
FOLDERS = ("hydra.run.dir", "hydra.sweep.dir")


def check_overrides(arguments: list[str]) -> None:
    """Refuse what Hydra would end in a traceback, or with files where nobody looks for them.

    Args:
        arguments: the command line after `python -m distill`.

    Raises:
        SettingError: a group with a value that can name no option of it, or an empty run folder.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    groups = {each.name for each in CONF.iterdir() if each.is_dir()} | {"recipe"}
    for argument in arguments:
        if argument.startswith(("-", "~")) or "=" not in argument:
            continue
        try:
            override = OverridesParser.create().parse_override(argument)
        except HydraException:
            continue  # Hydra says it itself
        if override.is_sweep_override():
            continue
        name, value = override.key_or_group, override.value()
        if name in groups and not isinstance(value, str | list | dict):
            raise SettingError(f"{name}={written(value)} is no option: choose one of {', '.join(_options(name))}")
        if name in FOLDERS and (value is None or not str(value).strip()):
            raise SettingError(f"{name}={value} is empty (a shell variable that is not set?): give a folder")
        if name == "train" and not isinstance(value, dict):
            group_of(name, value)


def _options(group: str) -> list[str]:
    folder = RECIPES if group == "recipe" else CONF / group
    return sorted(file.stem for file in folder.glob("*.yaml"))


def check_trust(arguments: list[str]) -> None:
    """Look at what Hydra itself would run, such as its callbacks, before it does, where `trust.targets` is given.

    Raises:
        SettingError: a recipe names code there that is not allowed.
    """
    from hydra import compose, initialize_config_dir
    from omegaconf import OmegaConf

    if not any(each.startswith(("trust.targets=", "+trust.targets=", "++trust.targets=")) for each in arguments):
        return
    folders = [own for option, own in pairwise(arguments) if option in ("--config-dir", "-cd")]
    folders += [each.partition("=")[2] for each in arguments if each.startswith("--config-dir=")]
    overrides = [each for each in arguments if "=" in each and not each.startswith("-")]
    overrides += [f"hydra.searchpath=[{','.join(f'file://{Path(each).absolute()}' for each in folders)}]"] * bool(
        folders
    )
    with initialize_config_dir(str(CONF), version_base="1.3"):
        composed = compose("config", overrides, return_hydra_config=True)
    settings = OmegaConf.to_container(composed, resolve=False)
    assert isinstance(settings, dict)
    refuse_targets(settings["hydra"], settings["trust"]["targets"], "hydra")
