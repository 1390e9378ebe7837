"""Dataclasses that JSON holds: how they are read, with every value of the declared kind, and how they are written.

A part that JSON lacks, or has as null, takes its default, so that readers need no checks. The key of a field
is its name, unless `stored` gives it another one.
"""

from contextlib import suppress
from dataclasses import fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

Part = TypeVar("Part")


def stored(key: str = "", sparse: bool = False) -> dict[str, Any]:
    """The metadata of a field.

    Args:
        key: in JSON, where that is not the name of the field; `*` for a dict whose entries are beside the fields.
        sparse: JSON has it only where there is something in it.
    """
    return {"key": key, "sparse": sparse}


def to_json(value: Any) -> Any:
    """A part, or what it is made of, as `json` writes it."""
    if isinstance(value, dict):
        return {str(name): to_json(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(inner) for inner in value]
    if not is_dataclass(value):
        return value
    written: dict[str, Any] = {}
    for item in fields(value):
        inner = to_json(getattr(value, item.name))
        if _key(item) == "*":
            written |= inner
        elif inner not in (None, {}, []) or not item.metadata.get("sparse"):
            written[_key(item)] = inner
    return written


def from_json(kind: type[Part], value: Any, path: str = "") -> Part:
    """A part from what `to_json` gave; keys that it does not have are passed over.

    Raises:
        ValueError: a value is of another kind than its field; the message names both.
    """
    part: Part = _read_part(kind, value, path)
    return part


def _read_part(kind: Any, value: Any, path: str) -> Any:
    if not isinstance(value, dict):
        raise _mismatch(kind, value, path)
    fields_by_key = {_key(item): item for item in fields(kind)}
    beside = {name: inner for name, inner in value.items() if name not in fields_by_key and isinstance(inner, dict)}
    hints = _hints(kind)
    present = {key: inner for key in fields_by_key if (inner := beside if key == "*" else value.get(key)) is not None}
    return kind(
        **{
            fields_by_key[key].name: _read(hints[fields_by_key[key].name], inner, f"{path}.{key}".strip(".*"))
            for key, inner in present.items()
        }
    )


def _read(kind: Any, value: Any, path: str) -> Any:
    if isinstance(kind, UnionType):
        return _read_union(get_args(kind), value, path)
    if is_dataclass(kind):
        return _read_part(kind, {} if value is None else value, path)
    if kind is Any or (kind is float and type(value) is int):
        return value
    plain, inner = get_origin(kind) or kind, get_args(kind)
    if not isinstance(value, plain) or (isinstance(value, bool) and plain is not bool):
        raise _mismatch(plain, value, path)
    if plain is dict:
        return {str(name): _read(inner[1], content, f"{path}.{name}") for name, content in value.items()}
    return [_read(inner[0], content, f"{path}[{at}]") for at, content in enumerate(value)] if plain is list else value


def _read_union(kinds: tuple[Any, ...], value: Any, path: str) -> Any:
    """The value as the first of some kinds that it is of."""
    if value is None and NoneType in kinds:
        return None
    *first_kinds, last = [kind for kind in kinds if kind is not NoneType]
    for kind in first_kinds:
        with suppress(ValueError):
            return _read(kind, value, path)
    return _read(last, value, path)


@cache
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)


def _key(item: Any) -> str:
    return item.metadata.get("key") or item.name


def _mismatch(kind: Any, value: Any, path: str) -> ValueError:
    expected = "an object" if is_dataclass(kind) or kind is dict else f"of the type {kind.__name__}"
    return ValueError(f"{path or 'the content'} is {str(value)[:40]!r} and not {expected}")
