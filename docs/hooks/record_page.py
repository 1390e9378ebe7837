"""The schema of results.json as Markdown, for reference/record.md: from the dataclasses that hold a run's record."""

import dataclasses
import inspect
import re
from collections.abc import Iterator
from functools import cache
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

from markdown_text import escaped, paragraphs
from record_words import WORDS

from distill.runs.record import Record

NAMES = {str: "string", int: "integer", float: "number", bool: "boolean", Any: "any value"}


def text() -> str:
    """The page as Markdown."""
    parts: list[str] = []
    for cls in parts_of(Record):
        title = "The whole record" if cls is Record else cls.__name__
        about = "" if cls is Record else _about(cls)
        parts += [
            f"\n## {title} {{ #{cls.__name__} }}\n",
            f"{about}\n" if about else "",
            "\n| key | value | what it is |\n| --- | --- | --- |",
        ]
        parts += [f"| {' | '.join(row)} |" for row in _rows(cls)]
    return "\n".join(parts) + "\n"


def _about(cls: type) -> str:
    generated = f"{cls.__name__}("  # the docstring of a dataclass without one
    return "" if (cls.__doc__ or "").startswith(generated) else "\n\n".join(paragraphs(cls.__doc__))


def parts_of(cls: type) -> list[type]:
    """The class and all those that its fields hold, each once."""
    found: list[type] = [cls]
    for one in found:
        for hint in get_type_hints(one).values():
            found += [inner for inner in _held(hint) if inner not in found]
    return found


def _held(hint: Any) -> list[type]:
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return [hint]
    return list(dict.fromkeys(inner for part in get_args(hint) for inner in _held(part)))


def _rows(cls: type) -> Iterator[tuple[str, str, str]]:
    hints = get_type_hints(cls)
    for item in dataclasses.fields(cls):
        key = "MEASURE" if item.metadata.get("key") == "*" else item.metadata.get("key") or item.name
        sparse = " Left out where empty." if item.metadata.get("sparse") else ""
        yield f"`{key}`", _type(hints[item.name]), f"{meaning(cls, item.name, key)}{sparse}".replace("|", "\\|")


def meaning(cls: type, field: str, key: str) -> str:
    """What a key is, from a comment or a docstring of its class or else from `WORDS`; empty where neither has it."""
    return _comments(cls).get(field) or WORDS.get(f"{cls.__name__}.{key}") or WORDS.get(key, "")


def _type(hint: Any) -> str:
    """A type in the words of JSON, with links to the parts; null goes without saying."""
    origin, inner = get_origin(hint), [part for part in get_args(hint) if part is not NoneType]
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return f"[{hint.__name__}](#{hint.__name__})"
    if origin is list:
        return f"array of {_type(inner[0])}"
    if origin is dict:
        return f"object of {_type(inner[1])}"
    if inner:
        return " or ".join(dict.fromkeys(_type(part) for part in inner))
    return NAMES.get(hint, str(hint))


@cache
def _comments(cls: type) -> dict[str, str]:
    """What comments and docstrings of a class and its bases have of its fields, each as a sentence."""
    found: dict[str, str] = {}
    for base in reversed(inspect.getmro(cls)):
        if not dataclasses.is_dataclass(base):
            continue
        for name, comment in re.findall(r"^    (\w+): .*?  # (.+)$", inspect.getsource(base), re.M):
            found[name] = comment
        for names, comment in re.findall(r"^        ([\w, ]+): (.+)$", inspect.getdoc(base) or "", re.M):
            found |= dict.fromkeys(names.split(", "), comment)
        for names, comment in re.findall(r"^    ([\w, ]+): (.+)$", inspect.getdoc(base) or "", re.M):
            found |= dict.fromkeys(names.split(", "), comment)
    return {name: _sentence(comment) for name, comment in found.items()}


def _sentence(comment: str) -> str:
    comment = escaped(re.sub(r"\bNone\b", "null", comment.strip().rstrip(".")))
    return f"{comment[0].upper()}{comment[1:]}."
