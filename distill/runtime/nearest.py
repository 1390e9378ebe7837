"""Answers a name that is not known with the known names that are spelled most like it."""

from collections.abc import Iterable
from difflib import get_close_matches

from distill.runtime.errors import SettingError

MOST = 3  # names that are suggested


def did_you_mean(name: object, known: Iterable[str], before: str = "") -> str:
    """The words that suggest the nearest names, `before` in front of each; nothing where none is spelled nearly so."""
    names = {each.lower(): each for each in known}
    found = [before + names[each] for each in get_close_matches(str(name).lower(), names, MOST)]
    return f" (did you mean {' or '.join(found)}?)" if found else ""


def choose(setting: str, value: str, options: Iterable[str]) -> None:
    """Raises SettingError where `value` is none of the options."""
    options = list(options)
    if value not in options:
        raise SettingError(
            f"{setting}={value} is not known{did_you_mean(value, options)}: choose one of {', '.join(options)}"
        )
