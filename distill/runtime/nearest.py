"""Suggests the nearest valid names for an unknown one."""

from collections.abc import Iterable
from difflib import get_close_matches

from distill.runtime.errors import SettingError

MAX_NAMES = 3  # names that are suggested


def did_you_mean(name: object, options: Iterable[str], before: str = "") -> str:
    """The nearest options, `before` in front of each, as ` (did you mean bert?)`; empty where none is near."""
    names = {option.lower(): option for option in options}
    nearest = [before + names[key] for key in get_close_matches(str(name).lower(), names, MAX_NAMES)]
    return f" (did you mean {' or '.join(nearest)}?)" if nearest else ""


def choose(setting: str, value: str, options: Iterable[str]) -> None:
    """Raises SettingError where `value` is none of the options."""
    options = list(options)
    if value not in options:
        raise SettingError(
            f"{setting}={value} is not known{did_you_mean(value, options)}: choose one of {', '.join(options)}"
        )
