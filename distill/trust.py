"""Which code a recipe may run: what its `_target_`s name, all of it or only what a list allows.

The list is for recipes of strangers. It holds for what a recipe can say: code by its import path, the code of a model
repository, and everything that Hydra would run or set for it. It does not hold for the command line, for the files of
the models and data that a recipe names, nor for what the allowed code does with the settings that it gets, nor for
kernels that transformers fetches where the package `kernels` is installed and `attn_implementation` names some. A chain
starts commands of its own and cannot be run with a list.
"""

import importlib
from typing import Any

from distill.component import OPTIMIZERS, SCHEDULES, SOURCES, TABLES, TERMS, built_in, kinds
from distill.errors import SettingError

BUILT_IN = (SOURCES, TABLES, TERMS, OPTIMIZERS, SCHEDULES)
# What Hydra starts jobs with where no setting says otherwise.
OF_HYDRA = tuple(
    f"hydra._internal.core_plugins.basic_{part}.Basic{part.capitalize()}" for part in ("launcher", "sweeper")
)
REMOTE = "trust_remote_code"


def refuse_targets(settings: Any, allowed: list[str], name: str = "") -> None:
    """Raises SettingError for the first `_target_` that is not allowed, before anything of it is imported.

    What lies in an allowed package or module is allowed where it is defined there; what is only imported there has to
    be allowed by its own path. To find that out, modules that are allowed are imported.

    Args:
        settings: nested and resolved, as they were composed.
        allowed: packages, modules and callables by their import paths.
        name: of the settings, for the error.
    """
    if isinstance(settings, dict):
        if (target := settings.get("_target_")) is not None:
            _refuse_target(str(target), allowed, f"{name}._target_={target}".lstrip("."))
        for key, value in settings.items():
            refuse_targets(value, allowed, f"{name}.{key}".lstrip("."))
    elif isinstance(settings, list | tuple):
        for number, value in enumerate(settings):
            refuse_targets(value, allowed, f"{name}.{number}")


def refuse_remote_code(settings: Any, overrides: list[str], name: str = "") -> None:
    """Raises SettingError where a recipe sets `trust_remote_code`, and not the command line by that very name.

    Args:
        overrides: of the command line, such as `teacher.trust_remote_code=true`.
    """
    if isinstance(settings, dict):
        for key, value in settings.items():
            setting = f"{name}.{key}".lstrip(".")
            said = any(each.lstrip("+").partition("=")[0] == setting for each in overrides)
            if key == REMOTE and value not in (None, False) and not said:
                raise SettingError(
                    f"{setting}={value} is set by a recipe, and trust.targets is given: say {setting}=true on the "
                    "command line if you trust the code of that model"
                )
            refuse_remote_code(value, overrides, setting)
    elif isinstance(settings, list | tuple):
        for number, each in enumerate(settings):
            refuse_remote_code(each, overrides, f"{name}.{number}")


def refuse_collective(settings: dict[str, Any], allowed: list[str], overrides: list[str]) -> None:
    """Raises SettingError where a recipe lets `backend.collective` import a module that is not allowed.

    Args:
        overrides: of the command line, which may name any.
    """
    backend = settings.get("backend")
    given = str(backend.get("collective") or "") if isinstance(backend, dict) else ""
    module, separator, _ = given.partition(":")
    if not separator or any(each.lstrip("+").startswith("backend.collective=") for each in overrides):
        return
    if not any(f"{module}.".startswith(f"{each}.") for each in allowed):
        raise SettingError(
            f"backend.collective={given} is set by a recipe, and its module is not among trust.targets={allowed}: add "
            "it there, or give the setting on the command line, if you trust that code"
        )


def _refuse_target(target: str, allowed: list[str], written: str) -> None:
    if target in (*allowed, *OF_HYDRA) or _is_built_in(target):
        return
    if not any(target.startswith(f"{each}.") for each in allowed):
        raise SettingError(
            f"{written} is not among trust.targets={allowed}: add it or its package there if you trust that code"
        )
    home = _home(target)
    if home is not None and not any(f"{home}.".startswith(f"{each}.") for each in allowed):
        raise SettingError(
            f"{written} is not defined there but in {home or 'no module'}, which is not among trust.targets={allowed}: "
            f"add {target} there if you trust that code"
        )


def _is_built_in(target: str) -> bool:
    """Whether a setting `kind` names the same."""
    module = target.rpartition(".")[0]
    wing, _, kind = module.rpartition(".")
    return wing in BUILT_IN and kind in kinds(wing) and target == built_in(wing, kind)


def _home(target: str) -> str | None:
    """The module that defines a callable, empty where it names none; None for what cannot be imported."""
    module, _, name = target.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError):
        return None  # whatever calls it says so in a line of its own
    return getattr(found, "__module__", None) or ""
