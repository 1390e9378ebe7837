"""Keeps logins in URLs and the Hub's tokens out of what a run writes and prints.

Any other secret belongs into an environment variable: settings are written as they were given, `${oc.env:NAME}`.
"""

import re
from collections.abc import Callable
from typing import Any

MASK = "***"
FROM_ENVIRONMENT = "${oc.env:"  # how a setting begins that is written as the name of a variable
OF_HUB = re.compile(r"\bhf_[A-Za-z0-9]{20,}")
LOGIN = re.compile(r"""(?<=://)[^/\s?#"'<>]+(?=@)""")  # user:password of an address, or a token alone


def redact(text: str) -> str:
    """`text` with logins in URLs and tokens of the Hub masked."""
    return LOGIN.sub(MASK, OF_HUB.sub(MASK, text))


def redacted(value: Any, by: Callable[[str], str] = redact) -> Any:
    """`value`, nested, with all texts in it redacted."""
    if isinstance(value, dict):
        return {key: redacted(inner, by) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [redacted(inner, by) for inner in value]
    return by(value) if isinstance(value, str) else value
