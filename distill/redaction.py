"""Keeps passwords and keys out of everything that a run writes: settings by their names, texts by what they contain."""

import re
from typing import Any

MASK = "***"
# Words that make the name of a setting one of a secret; a name is split at its points, dashes and capitals.
SECRET = {
    "password",
    "passwd",
    "pwd",
    "passphrase",
    "secret",
    "secrets",
    "credential",
    "credentials",
    "apikey",
    "token",
}
SECRET |= {"auth", "authorization", "bearer"}
BEFORE_KEY = {"api", "access", "private", "secret", "account", "signing", "encryption", "auth"}  # as in api_key
# A token of a text is none of these: mask_token, pad_token.
BEFORE_TOKEN = {"mask", "pad", "sep", "cls", "bos", "eos", "unk", "eot", "special", "image", "start", "end", "per"}
SHORTEST = 4  # characters of a secret that is looked for in texts: a shorter one would be found everywhere

# name=value and name: value, in overrides, YAML, JSON and dicts as Python prints them.
NAME = re.compile(r"""([\w.-]+)["']?\s*[=:]\s*""")
VALUE = re.compile(r""""[^"]*"|'[^']*'|[^\s,;}\])"'{\[]+""")
LOGIN = re.compile(r"(?<=://)[^/\s:@]+:[^/\s@]+(?=@)")  # user:password of an address

_known: set[str] = set()  # the values of secrets that this process has seen


def is_secret(name: str) -> bool:
    """Whether a setting of that name holds a secret, by its last part."""
    words = [word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|\d+", name.rpartition(".")[2])]
    before = dict(zip(words[1:], words, strict=False))
    if "key" in words and before.get("key") in BEFORE_KEY:
        return True
    return any(word in SECRET and not (word == "token" and before.get(word) in BEFORE_TOKEN) for word in words)


def masked(value: Any, name: str = "") -> Any:
    """`value` with every secret in it replaced, and remembered so that `redact` finds it in texts.

    Args:
        value: settings, nested; what is not a string or a number is no secret.
        name: of the setting.
    """
    if isinstance(value, dict):
        return {key: masked(inner, f"{name}.{key}") for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [masked(inner, name) for inner in value]
    if is_secret(name) and value is not None and not isinstance(value, bool):
        _remember(str(value))
        return MASK
    return redact(value) if isinstance(value, str) else value


def redact(text: str) -> str:
    """`text` without the secrets in it: those of this run's settings, what a secret's name precedes, and logins."""
    text = LOGIN.sub(MASK, _mask_settings(text))
    for secret in sorted(_known, key=len, reverse=True):
        text = text.replace(secret, MASK)
    return text


def _mask_settings(text: str) -> str:
    pieces, end = [], 0
    for name in NAME.finditer(text):
        value = VALUE.match(text, name.end()) if is_secret(name[1]) and name.start() >= end else None
        if value and value[0] not in ("null", "None", "true", "false", "True", "False"):
            _remember(value[0].strip("\"'"))
            pieces += [text[end : value.start()], MASK]
            end = value.end()
    return "".join([*pieces, text[end:]])


def _remember(secret: str) -> None:
    if len(secret) >= SHORTEST and secret != MASK:
        _known.add(secret)
