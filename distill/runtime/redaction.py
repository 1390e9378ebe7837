"""Keeps passwords and keys out of everything that a run writes: settings by their names, texts by what they contain.

There are two kinds of names. A credential (`db_password`, `api_key`) opens something and has no part in the
student: it becomes `***`, and a run with another one is still the same run. Other names may hold a secret or not
(`acme_key`, but also `feature_key` and `auth_mode`): they become `***` and a digest of their value, so that runs that
differ in them are different runs.
"""

import hashlib
import re
from collections.abc import Iterator
from typing import Any

MASK = "***"
# Words that make a name that of a credential at its end, and one that may hold a secret elsewhere.
CREDENTIAL = {"password", "passwords", "passwd", "pwd", "passphrase", "secret", "secrets", "credential", "credentials"}
CREDENTIAL |= {"apikey", "apikeys", "auth", "authorization", "bearer"}
# Words that make a key or a token a credential: api_key, hf_token.
OPENS = {"api", "access", "private", "secret", "account", "signing", "encryption", "auth"}
OPENS |= {"hf", "hub", "huggingface", "wandb", "openai", "github", "aws", "azure"}
KEYS, TOKENS = ("key", "keys"), ("token", "tokens")
# Keys that are none of a lock: those of records and tables, of orders, and those of attention.
BEFORE_KEY = {"sort", "order", "group", "join", "primary", "foreign", "unique", "index", "row", "column", "field"}
BEFORE_KEY |= {"record", "dict", "map", "cache", "partition", "text", "label", "id", "public", "query", "cross", "num"}
# Tokens that are pieces of text.
BEFORE_TOKEN = {"mask", "pad", "sep", "cls", "bos", "eos", "unk", "eot", "special", "image", "start", "end", "per"}
BEFORE_TOKEN |= {"stop", "added", "additional", "extra", "new", "num", "max", "min", "first", "last"}
SHORTEST = 4  # characters of a secret that is looked for in texts: a shorter one would be found everywhere

WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")
# name=value and name: value, in overrides, YAML, JSON and dicts as Python prints them.
NAME = re.compile(r"""([\w.-]+)["']?\s*[=:]\s*""")
VALUE = re.compile(
    r"""\$\{oc\.env:\w+\}|"[^"]*"|'[^']*'|(?:(?:Bearer|Basic|Token|Digest)\s+)?[^\s,;&}\])"'{\[]+""", re.IGNORECASE
)
SIGNATURE = re.compile(r"(?i)(?<=[?&])((?:X-Amz-|X-Goog-)?Signature|sig)=[^&\s]+")  # of a URL that opens a file
BEARER = re.compile(r"\b(?<=[Bb]earer) +[\w.~+/=-]{8,}")
LOGIN = re.compile(r"""(?<=://)[^/\s?#"'<>]+(?=@)""")  # user:password of an address, or a token alone
NUMBER = re.compile(r"[-+]?[\d.]+(?:[eE][-+]?\d+)?")
NOTHING = ("null", "None", "true", "false", "True", "False")
FROM_ENVIRONMENT = re.compile(r"\$\{oc\.env:\w+\}")  # names where a secret is, and is none
MARK = re.compile(rf"{re.escape(MASK)}(?: [0-9a-f]{{12}})?")  # what `masked` has left

_known: dict[str, str] = {}  # secrets of this process's settings, and the marks that stand for them


def is_credential(name: str) -> bool:
    """Whether a setting of that name, or one that it lies in, opens something."""
    return any(_opens(part) for part in map(_words, name.split(".")))


def is_secret(name: str) -> bool:
    """Whether the value of a setting of that name is masked where it is a text."""
    if not CREDENTIAL.isdisjoint(_words(name)) or is_credential(name):
        return True
    *before, last = _words(name.rpartition(".")[2]) or [""]
    if last in TOKENS:
        return last == "token" if not before else before[-1] not in BEFORE_TOKEN
    return last in KEYS and bool(before) and before[-1] not in BEFORE_KEY


def masked(settings: Any, name: str = "") -> Any:
    """`settings` with every secret in them replaced, and remembered so that `redact` finds it in texts.

    All below a credential is one. Of numbers only credentials are masked, and not tokens, so that weights and counts
    stay, on which a student depends. Booleans and null stay.

    Args:
        settings: nested, of this process: what is remembered is never forgotten.
        name: of the setting.
    """
    return redacted(_by_names(settings, name))


def redacted(value: Any) -> Any:
    """`value` with all the texts in it redacted; nothing is learned from them."""
    if isinstance(value, dict):
        return {key: redacted(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [redacted(inner) for inner in value]
    return redact(value) if isinstance(value, str) else value


def redact(text: str) -> str:
    """`text` without this run's secrets, what a secret's name precedes, logins, and signatures of URLs."""
    for secret in sorted(_known, key=len, reverse=True):
        text = text.replace(secret, _known[secret])
    text = SIGNATURE.sub(rf"\1={MASK}", _mask_named(text))
    return LOGIN.sub(MASK, BEARER.sub(f" {MASK}", text))


def redact_override(override: str) -> str:
    """The same of NAME=VALUE, where all the rest is the value."""
    name, _, value = override.partition("=")
    mark = _mark(name.lstrip("+~"), _read(value))
    return redact(override) if mark is None else f"{name}={mark}"


def secrets_in(settings: Any, name: str = "") -> Iterator[str]:
    """The names of the settings that hold a secret itself, not only the name of the variable that it is in."""
    if isinstance(settings, dict | list | tuple):
        pairs = settings.items() if isinstance(settings, dict) else ((None, each) for each in settings)
        for key, inner in pairs:
            yield from secrets_in(inner, name if key is None else f"{name}.{key}".lstrip("."))
    elif _mark(name, settings) is not None:
        yield name


def _by_names(value: Any, name: str) -> Any:
    if isinstance(value, dict):
        return {key: _by_names(inner, f"{name}.{key}") for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_by_names(inner, name) for inner in value]
    mark = _mark(name, value)
    if mark is not None and len(str(value)) >= SHORTEST:
        _known[str(value)] = mark
    return value if mark is None else mark


def _mark(name: str, value: Any) -> str | None:
    """What stands in place of the value of a setting; None where it is no secret."""
    if value is None or isinstance(value, bool) or not is_secret(name) or not str(value):
        return None
    if isinstance(value, str):
        if MARK.fullmatch(value) or FROM_ENVIRONMENT.fullmatch(value):
            return None
        return MASK if is_credential(name) else f"{MASK} {hashlib.sha256(value.encode()).hexdigest()[:12]}"
    return MASK if any(_opens(part) and part[-1] not in TOKENS for part in map(_words, name.split("."))) else None


def _mask_named(text: str) -> str:
    pieces, end = [], 0
    for name in NAME.finditer(text):
        value = VALUE.match(text, name.end()) if name.start() >= end and is_secret(name[1]) else None
        if value is not None and (mark := _mark(name[1], _read(value[0]))) is not None:
            pieces += [text[end : value.start()], mark]
            end = value.end()
    return "".join([*pieces, text[end:]])


def _read(text: str) -> Any:
    """A value as it is written: a number stands for any, and other things than texts for null."""
    return float("nan") if NUMBER.fullmatch(text) else None if text in NOTHING else text.strip("\"'")


def _words(name: str) -> list[str]:
    """Those of a name, which are divided by dashes, digits and capitals."""
    return [word.lower() for word in WORD.findall(name)]


def _opens(words: list[str]) -> bool:
    before, last = ["", "", *words][-2:]
    return last in CREDENTIAL or (last in (*KEYS, *TOKENS) and before in OPENS)
