"""The settings as they are written down: as they were given, without the values of environment variables."""

import hashlib
import os
import re
from typing import Any

from distill.config.in_memory import InMemory
from distill.runtime.redaction import FROM_ENVIRONMENT, MASK, is_secret, masked, redacted, remember

VARIABLE = re.compile(r"(?:(?<![\w.-])([\w.-]++)=)?\$\{oc\.env:\s*(\w+)")  # with the parameter of a URL that it is


def without_environment(composed: Any) -> dict[str, Any]:
    """Hydra's configuration with everything resolved but what refers to the environment, which stays `${oc.env:NAME}`.

    The text is escaped, so that OmegaConf takes it as it is wherever else a setting refers to it.
    """
    from omegaconf import OmegaConf

    text = OmegaConf.create(_escaped(OmegaConf.to_container(composed, resolve=False)))
    container = OmegaConf.to_container(text, resolve=True)
    assert isinstance(container, dict)
    return {str(name): value for name, value in container.items()}


def written_and_compared(composed: Any, resolved: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The settings to write down, and those that a resumed run compares; neither holds a secret.

    What is compared has a digest in place of what came from the environment. A secret has no part in it: a run is
    resumed with a new key. All secrets of `resolved` are remembered, so that `redact` finds them in texts.
    """
    unresolved = without_environment(composed)
    _remember(unresolved, resolved)
    written = redacted(masked(unresolved))
    return written, _compared(written, resolved)


def as_yaml(settings: Any, resolve: bool = False) -> str:
    """Settings as the text of config.yaml: a dict, or Hydra's configuration, whose references it may resolve."""
    from omegaconf import OmegaConf

    return OmegaConf.to_yaml(OmegaConf.create(settings) if isinstance(settings, dict) else settings, resolve=resolve)


def _escaped(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _escaped(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_escaped(inner) for inner in value]
    if isinstance(value, str) and FROM_ENVIRONMENT in value:
        return re.sub(r"(?<!\\)\$\{", r"\\${", value)
    return str(value) if isinstance(value, InMemory) else value


def _remember(unresolved: Any, resolved: Any, name: str = "") -> None:
    for key, inner, value in _pairs(unresolved, resolved):
        _remember(inner, value, f"{name}.{key}".lstrip("."))
    if not isinstance(unresolved, str):
        return
    if is_secret(name):
        remember(str(resolved))
    for parameter, variable in VARIABLE.findall(unresolved):
        if is_secret(variable) or is_secret(parameter):
            remember(os.environ.get(variable, ""))


def _compared(written: Any, resolved: Any, name: str = "") -> Any:
    if isinstance(written, dict):
        pairs = _pairs(written, resolved)
        return {key: _compared(inner, value, f"{name}.{key}".lstrip(".")) for key, inner, value in pairs}
    if isinstance(written, list):
        return [_compared(inner, value, name) for _, inner, value in _pairs(written, resolved)]
    if not isinstance(written, str) or FROM_ENVIRONMENT not in written:
        return written
    return MASK if is_secret(name) else f"sha256 {hashlib.sha256(str(resolved).encode()).hexdigest()}"


def _pairs(one: Any, other: Any) -> list[tuple[Any, Any, Any]]:
    """The entries of two nested values of the same shape, each with its key or number; none of what is not nested."""
    if isinstance(one, dict) and isinstance(other, dict):
        return [(key, inner, other[key]) for key, inner in one.items()]
    if isinstance(one, list) and isinstance(other, list):
        return [(number, *both) for number, both in enumerate(zip(one, other, strict=True))]
    return []
