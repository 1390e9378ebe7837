"""Distill: a frozen teacher, a small student, and a report that shows how close they came.

The names in `__all__` are what programs and notebooks may rely on; everything else in the package may change from one
release to the next. Each is imported when it is first used, so that `import distill` itself loads nothing heavy.
"""

import re
from importlib import import_module
from pathlib import Path
from typing import Any

from distill.runtime.signals import follow_parent
from distill.runtime.version import __version__ as __version__

follow_parent()  # first of all, where a process of this package has started this one

# The module of each public name, by the stub beside this file, which type checkers and editors read.
_STUB = Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8")
_PUBLIC = {name: module for module, name in re.findall(r"^from (\S+) import (\w+) as \2$", _STUB, re.M)}

__all__ = sorted(_PUBLIC)


def __getattr__(name: str) -> Any:
    """A public name, imported at its first use."""
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_PUBLIC[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
