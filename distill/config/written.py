"""The settings as they are written down: as they were given, without the values of environment variables."""

import hashlib
import os
import re
from typing import Any

from distill.config.component import InMemory
from distill.runtime.redaction import FROM_ENVIRONMENT, redact, redacted, remember

VARIABLE = re.compile(FROM_ENVIRONMENT.pattern + r"\s*['\"]?(\w+)")


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
    """The settings to write down, and those that a resumed run compares; neither holds a login.

    What is compared has a digest in place of what came from the environment. A secret has no part in it: a run is
    resumed with a new key.
    """
    unresolved = without_environment(composed)
    for variable in VARIABLE.findall(str(unresolved)):
        remember(variable, os.environ.get(variable, ""))
    written = redacted(unresolved)
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
    if isinstance(value, str) and FROM_ENVIRONMENT.search(value):
        return re.sub(r"(?<!\\)\$\{", r"\\${", value)
    return str(value) if isinstance(value, InMemory) else value


def _compared(written: Any, resolved: Any) -> Any:
    if isinstance(written, dict):
        return {key: _compared(inner, resolved[key]) for key, inner in written.items()}
    if isinstance(written, list):
        return [_compared(*pair) for pair in zip(written, resolved, strict=True)]
    if not isinstance(written, str) or not FROM_ENVIRONMENT.search(written):
        return written
    return f"sha256 {hashlib.sha256(redact(str(resolved)).encode()).hexdigest()}"
