"""Keeps secrets out of what a run writes and prints.

Settings are written as they were given, with `${oc.env:NAME}` unresolved, so a secret that comes from the environment
reaches no file. The command line may hold none, because everybody on the machine can read it. One in a recipe is
written as `***`. A setting holds a secret by its name; `SECRET` has the names.
"""

import re
from collections.abc import Callable, Iterator
from typing import Any

MASK = "***"
SHORTEST = 4  # characters of a secret that is looked for in texts: a shorter one would be found everywhere
# What a setting that holds a secret is called, or what its name ends with: db_password, hf_token, api_key_2.
SECRET = re.compile(
    r"""(?:^|_)(?:passwords?|passwd|pwd|passphrase|pin|otp|secrets?|credentials?|auth|authorization|bearer|cookies?|token
    |jwt|pat|sas|dsn|webhook|signature|(?:connection_|conn_)str(?:ing)?|apikeys?
    |(?:api|access|account|private|secret|signing|encryption|auth|hf|wandb|openai)_keys?)(?:_\d+)?$""",
    re.VERBOSE,
)
PIECE_OF_TEXT = re.compile(r"(?:^|_)(?:mask|pad|sep|cls|bos|eos|unk|eot|start|end|stop|image|per|new|max)_token$")
# What stands for a variable that is not set; nothing, and another variable, are no secret.
NO_SECRET = r"""(?:null\s*\}|\}|''\s*\}|""\s*\}|\$\{\s*oc\.env:\s*\w+\s*\})"""
DEFAULT = re.compile(rf"\$\{{\s*oc\.env:\s*\w+\s*,(?!\s*{NO_SECRET})")
# NAME=VALUE and NAME: VALUE in an override, whose VALUE is neither null nor the name of an environment variable. A name
# is tried from its first sign alone and as a whole, or a long word would be read once for each of its signs.
LITERAL = re.compile(
    r"""(?<![\w.-])([\w.-]++)["']?\s*[=:]\s*+"""
    rf"""(?!["']?(?!{DEFAULT.pattern})\$\{{|["']?\s*(?:[,}}\])]|$)|(?:null|true|false)\b)""",
    re.IGNORECASE,
)
# What opens a file by its URL alone.
SIGNATURE = re.compile(r"(?i)(?:X-Amz-|X-Goog-)?(?:Signature|Credential|Security-Token)|sig")
PARAMETER = re.compile(r"""(?<=[?&])([\w.-]+)=([^&\s"'<>]*[^&\s"'<>,;.)\]}])""")  # of a URL
BEARER = re.compile(r"\b(?<=[Bb]earer) +[\w.~+/=-]{8,}")
LOGIN = re.compile(r"""(?<=://)[^/\s?#"'<>]+(?=@)""")  # user:password of an address, or a token alone
FROM_ENVIRONMENT = "${oc.env:"

_secrets: set[str] = set()  # those of this process's settings, which `redact` looks for


def is_secret(name: str) -> bool:
    """Whether a setting of that dotted name, or one that it is in, holds a secret."""
    return any(_is_name(part) for part in name.split("."))


def _is_name(part: str) -> bool:
    snake_case = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|-", "_", part).lower()  # apiKey, api-key
    return SECRET.search(snake_case) is not None and PIECE_OF_TEXT.search(snake_case) is None


def secrets_in(settings: Any, name: str = "") -> Iterator[str]:
    """The dotted names of the settings that hold a secret itself, not the name of the variable that it is in."""
    if isinstance(settings, dict):
        for key, inner in settings.items():
            yield from secrets_in(inner, f"{name}.{key}".lstrip("."))
    elif isinstance(settings, list | tuple):
        for inner in settings:
            yield from secrets_in(inner, name)
    elif _holds_secret(name, settings):
        yield name


def _holds_secret(name: str, value: Any) -> bool:
    """Whether a value is a secret by the name of its setting. Numbers are weights and counts, but for passwords."""
    text = str(value)
    if value is None or isinstance(value, bool) or not text or (FROM_ENVIRONMENT in text and not DEFAULT.search(text)):
        return False
    return is_secret(name) and (isinstance(value, str) or "token" not in name)


def masked(settings: Any, name: str = "") -> Any:
    """`settings`, nested, with `***` in place of every secret in them."""
    if isinstance(settings, dict):
        return {key: masked(inner, f"{name}.{key}".lstrip(".")) for key, inner in settings.items()}
    if isinstance(settings, list | tuple):
        return [masked(inner, name) for inner in settings]
    return MASK if _holds_secret(name, settings) else settings


def remember(secret: str) -> None:
    """Let `redact` mask this text from here on, wherever it comes from: an error of a user's own code may show it."""
    if len(secret) >= SHORTEST:
        _secrets.add(secret)


def literal_secret(override: str) -> str | None:
    """The name under which an override of the command line holds a secret itself; None where it holds none."""
    return next((match[1].lstrip("+~") for match in LITERAL.finditer(override) if is_secret(match[1])), None)


def redact(text: str) -> str:
    """`text` without the secrets of this process's settings, logins and signatures of URLs, and bearers' tokens."""
    for secret in sorted(_secrets, key=len, reverse=True):
        text = text.replace(secret, MASK)
    return LOGIN.sub(MASK, BEARER.sub(f" {MASK}", PARAMETER.sub(_parameter, text)))


def _parameter(match: re.Match[str]) -> str:
    name, value = match.groups()
    from_environment = value.startswith("${") and not DEFAULT.search(value)
    is_open = from_environment or not (SIGNATURE.fullmatch(name) or is_secret(name))
    return match[0] if is_open else f"{name}={MASK}"


def redacted(value: Any, by: Callable[[str], str] = redact) -> Any:
    """`value`, nested, with all texts in it redacted."""
    if isinstance(value, dict):
        return {key: redacted(inner, by) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [redacted(inner, by) for inner in value]
    return by(value) if isinstance(value, str) else value
