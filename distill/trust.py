"""Which code a recipe may run: what its `_target_`s name, all of it or only what a list allows."""

from typing import Any

from distill.errors import SettingError

KEYS = ("_target_", "()", "class")  # the latter two in the configuration of logging, which Hydra has a part for
OWN = ("distill", "hydra._internal.core_plugins")  # this package, and the launcher and sweeper that Hydra begins with


def refuse_targets(settings: Any, allowed: list[str] | None, name: str = "") -> None:
    """Raises SettingError for the first `_target_` that is not allowed, before anything of it is imported.

    Args:
        settings: nested, as they were composed.
        allowed: packages, modules and callables by their import paths; None: any.
        name: of the settings, for the error.
    """
    if allowed is None:
        return
    if isinstance(settings, dict):
        for key in KEYS:
            target = settings.get(key)
            if target is not None and not any(_lies_in(str(target), each) for each in [*OWN, *allowed]):
                raise SettingError(
                    f"{name}.{key}={target} is not among trust.targets={allowed}: add it or its package there if you "
                    "trust that code"
                )
        for key, value in settings.items():
            refuse_targets(value, allowed, f"{name}.{key}".lstrip("."))
    elif isinstance(settings, list | tuple):
        for number, value in enumerate(settings):
            refuse_targets(value, allowed, f"{name}.{number}")


def _lies_in(target: str, allowed: str) -> bool:
    return target == allowed or target.startswith(f"{allowed}.")
