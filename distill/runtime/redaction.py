"""Keeps secrets out of what a run writes and prints.

Settings are written as they were given, with `${oc.env:NAME}` unresolved, so a secret that comes from the environment
reaches no file; and what such a variable holds is masked in texts. Logins in URLs and tokens of the Hub are masked
wherever they stand. The names of settings say nothing: many of them are the user's.
"""

import re
from collections.abc import Callable
from typing import Any

MASK = "***"
SHORTEST = 4  # characters of a secret that is looked for in texts: a shorter one would be found everywhere
# How the name of an environment variable ends that holds a secret, or that of a parameter of a URL.
SECRET = re.compile(
    r"(?i)(?:^|[_-])(?:tokens?|keys?|apikey|secrets?|password|passwd|pwd|passphrase|credentials?|auth|pat|jwt|dsn|sas|sig"
    r"|signature)(?:_\d+)?$"
)
FOLDERS = ("PWD", "OLDPWD")  # of the shell
PARAMETER = re.compile(r"""(?<=[?&])([\w.-]+)=([^&\s"'<>]*[^&\s"'<>,;.)\]}])""")  # of a URL
BEARER = re.compile(r"\b(?<=[Bb]earer) +[\w.~+/=-]{8,}")
OF_HUB = re.compile(r"\bhf_[A-Za-z0-9]{20,}")
LOGIN = re.compile(r"""(?<=://)[^/\s?#"'<>]+(?=@)""")  # user:password of an address, or a token alone
FROM_ENVIRONMENT = "${oc.env:"

_secrets: set[str] = set()  # those of this process's settings, which `redact` looks for


def is_secret(name: str) -> bool:
    """Whether an environment variable of that name, or a parameter of a URL, holds a secret."""
    return SECRET.search(name[-100:]) is not None and name not in FOLDERS


def remember(secret: str) -> None:
    """Let `redact` mask this text from here on, wherever it comes from: an error of a user's own code may show it."""
    if len(secret) >= SHORTEST:
        _secrets.add(secret)


def redact(text: str) -> str:
    """`text` without the secrets that are remembered, logins and signatures of URLs, and tokens of bearers and the Hub.

    What refers to a variable, `token=${oc.env:NAME}`, stays.
    """
    for secret in sorted(_secrets, key=len, reverse=True):
        text = text.replace(secret, MASK)
    text = OF_HUB.sub(MASK, BEARER.sub(f" {MASK}", PARAMETER.sub(_parameter, text)))
    return LOGIN.sub(MASK, text)


def _parameter(match: re.Match[str]) -> str:
    name, value = match.groups()
    return match[0] if value.startswith("${") or not is_secret(name) else f"{name}={MASK}"


def redacted(value: Any, by: Callable[[str], str] = redact) -> Any:
    """`value`, nested, with all texts in it redacted."""
    if isinstance(value, dict):
        return {key: redacted(inner, by) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [redacted(inner, by) for inner in value]
    return by(value) if isinstance(value, str) else value
