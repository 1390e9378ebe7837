"""Finds what of the public interface, `distill.__all__`, has no docstring: names, and their methods and properties."""

import inspect
from collections.abc import Iterator
from functools import cached_property

import distill

DESCRIPTORS = (property, cached_property, classmethod, staticmethod)


def missing_docstrings() -> list[str]:
    """The dotted names without a docstring, sorted."""
    missing = set()
    for name in distill.__all__:
        value = getattr(distill, name)
        if name == "__version__":
            continue
        if not _is_described(value):
            missing.add(f"distill.{name}")
        if inspect.isclass(value):
            missing |= {f"distill.{name}.{member}" for member in _undescribed_members(value)}
    return sorted(missing)


def _undescribed_members(cls: type) -> Iterator[str]:
    """The public methods and properties that classes of this package give to `cls`, where none of them describes it."""
    for owner in inspect.getmro(cls):
        if not owner.__module__.startswith("distill."):
            continue
        for name, member in vars(owner).items():
            is_method = inspect.isroutine(member) or isinstance(member, DESCRIPTORS)
            if is_method and not name.startswith("_") and not _is_described(inspect.getattr_static(cls, name)):
                yield name


def _is_described(value: object) -> bool:
    return len((inspect.getdoc(value) or "").strip()) > 10
