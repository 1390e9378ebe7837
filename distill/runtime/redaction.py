"""Keeps logins and signatures in URLs, the Hub's tokens and secrets of the environment out of what a run writes.

Settings are written as they were given, with `${oc.env:NAME}` unresolved; what a variable holds whose name says that it
is a secret is masked in texts as well, such as the address of a corpus in a model card.
"""

import re
from collections.abc import Callable
from typing import Any

MASK = "***"
FROM_ENVIRONMENT = re.compile(r"\$\{\s*oc\.env\s*:")  # how a setting begins that is written as the name of a variable
OF_HUB = re.compile(r"\bhf_[A-Za-z0-9]{20,}")
# How the name of an environment variable ends that holds a secret, or that of a parameter of a URL.
SECRET = re.compile(r"(?i)((token|key|secret|credential)s?|password|signature|(^|[_-])(auth|sas|sig))(_\d+)?$")
SHORTEST = 4  # characters of a secret that is looked for in texts: a shorter one would be found everywhere
PARAMETER = re.compile(r"""(?<=[?&])([\w.-]+)=(?!\$\{)[^&\s"'<>]*[^&\s"'<>,;.)\]}]""")  # of a URL
LOGIN = re.compile(r"""(?<=://)[^/\s?#"'<>]+(?=@)""")  # user:password of an address, or a token alone


_secrets: set[str] = set()  # of this process's settings


def remember(name: str, value: str) -> None:
    """Let `redact` mask what a variable of the environment holds, if its name says that it is a secret."""
    if len(value) >= SHORTEST and SECRET.search(name):
        _secrets.add(value)


def redact(text: str) -> str:
    """`text` with remembered secrets, logins and signatures in URLs, and tokens of the Hub masked."""
    for secret in sorted(_secrets, key=len, reverse=True):
        text = text.replace(secret, MASK)
    text = PARAMETER.sub(lambda found: f"{found[1]}={MASK}" if SECRET.search(found[1]) else found[0], text)
    return LOGIN.sub(MASK, OF_HUB.sub(MASK, text))


def redacted(value: Any, by: Callable[[str], str] = redact) -> Any:
    """`value`, nested, with all texts in it redacted."""
    if isinstance(value, dict):
        return {key: redacted(inner, by) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [redacted(inner, by) for inner in value]
    return by(value) if isinstance(value, str) else value
