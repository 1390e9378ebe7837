"""Digests of classes, functions and objects of a program: of their code, and of the values that they hold."""

import hashlib
import inspect
import io
import logging
import pickle
from collections.abc import Mapping
from dis import get_instructions
from functools import partial
from pathlib import Path
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any

import numpy as np
from torch import Tensor

from distill.runtime.users_code import is_users_module, source_digest

STAYING = (type(None), bool, int, float, str, bytes, Path, np.generic, np.ndarray, Tensor)


def digest_of(value: Any) -> str:
    """sha256 of the source code of a class or function, or of that of an object's class and of the object's values."""
    return _sha256(_text(value, set()))


def code_digest(function: Any) -> str:
    """sha256 of what a function computes: its compiled code, and the values and functions that it reads around it.

    These are defaults, the variables that it closes over, and globals: numbers, strings, tuples, tensors, and
    functions, classes and modules of the user's in turn. Anything else may change while a program runs. Another Python
    compiles other code.
    """
    return _sha256(_function(function, set()))


def _function(function: Any, seen: set[int]) -> str:
    if isinstance(function, partial):
        return f"{_read(function.func, seen)} {_text(function.args, set())} {_text(function.keywords, set())}"
    function = getattr(function, "__func__", function)
    code = getattr(function, "__code__", None)
    if code is None or id(function) in seen:
        return str(getattr(function, "__qualname__", type(function)))
    seen.add(id(function))
    cells = dict(zip(code.co_freevars, function.__closure__ or (), strict=True))
    around = {name: cell.cell_contents for name, cell in cells.items() if cell != CellType()}
    around |= {name: function.__globals__[name] for name in _names(code) if name in function.__globals__}
    around |= {"": function.__defaults__ or (), "*": tuple(sorted((function.__kwdefaults__ or {}).items()))}
    return f"{_code(code)} {[(name, _read(value, seen)) for name, value in sorted(around.items())]}"


def _read(value: Any, seen: set[int]) -> str:
    """What a function reads, as far as that is a value that stays, or code of the user's."""
    if isinstance(value, tuple):
        return str([_read(one, seen) for one in value])
    if isinstance(value, ModuleType):
        return source_digest(f"{value.__name__}.") or value.__name__
    if isinstance(value, partial):
        return _function(value, seen)
    if isinstance(value, FunctionType | type) and is_users_module(value.__module__):
        return _function(value, seen) if isinstance(value, FunctionType) else _source(value)
    return _text(value, set()) if isinstance(value, STAYING) else type(value).__qualname__


def _names(code: CodeType) -> set[str]:
    """The global names in compiled code and what is defined in that."""
    names = {str(one.argval) for one in get_instructions(code) if one.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    return names.union(*(_names(one) for one in code.co_consts if isinstance(one, CodeType)))


def _text(value: Any, seen: set[int]) -> str:
    """A text that is another one for every other value; `seen`: the objects before it, by id."""
    if isinstance(value, None | bool | int | float | str | bytes | Path | np.generic):
        return repr(value)
    if id(value) in seen:
        return "again"
    seen.add(id(value))
    if isinstance(value, Mapping):
        return str(sorted(f"{_text(key, seen)}: {_text(inner, seen)}" for key, inner in value.items()))
    if isinstance(value, list | tuple):
        return str([_text(inner, seen) for inner in value])
    if isinstance(value, set | frozenset):
        return str(sorted(_text(inner, seen) for inner in value))
    if isinstance(value, Tensor):
        value = value.detach().cpu().double().numpy() if value.is_floating_point() else value.cpu().numpy()
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        return f"{value.dtype} {value.shape} {_sha256(np.ascontiguousarray(value).tobytes())}"
    if isinstance(value, partial):
        return f"{_text(value.func, seen)} {_text(value.args, seen)} {_text(value.keywords, seen)}"
    if inspect.isclass(value) or inspect.isroutine(value):
        return _source(value)
    if isinstance(value, logging.Logger | io.IOBase | ModuleType):  # of the whole process, and no part of a value
        return type(value).__qualname__
    is_frame = type(value).__module__.startswith("pandas")
    if hasattr(value, "__dict__") and not is_frame:
        return f"{_source(type(value))} {_text(vars(value), seen)}"
    try:
        return _sha256(pickle.dumps(value))
    except Exception:  # of whatever kind an object raises that cannot be pickled
        return type(value).__qualname__


def _source(value: Any) -> str:
    """The source code of a class or function; what stands for it where it was typed into an interpreter or is of C."""
    try:
        return inspect.getsource(value)
    except (OSError, TypeError):
        name = f"{value.__module__}.{value.__qualname__}"
    if inspect.isclass(value) and value.__module__ == "__main__":
        members = [key for key in vars(value) if key not in ("__dict__", "__weakref__", "__doc__")]
        return f"{name} {sorted(f'{key}={_member(vars(value)[key])}' for key in members)}"
    code = getattr(value, "__code__", None)
    return name if code is None else f"{name} {_code(code)} {getattr(value, '__defaults__', None)!r}"


def _member(value: Any) -> str:
    value = value.fget if isinstance(value, property) else value
    return _source(value) if inspect.isroutine(value) and hasattr(value, "__code__") else _text(value, set())


def _code(code: CodeType) -> str:
    """What compiled code does, without the places of its lines."""
    constants = [_code(one) if isinstance(one, CodeType) else _text(one, set()) for one in code.co_consts]
    return f"{code.co_code.hex()} {code.co_names} {code.co_varnames} {constants}"


def _sha256(content: str | bytes) -> str:
    return hashlib.sha256(content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content).hexdigest()
