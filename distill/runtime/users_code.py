"""Classes and functions of the user's: what went wrong in one, in one line, and a digest of the files behind it."""

import ast
import hashlib
import os
import sys
import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path

from distill.runtime.errors import SettingError
from distill.runtime.host import is_out_of_memory

# What code raises that takes something for what it is not; memory, storage and signals are none of these.
MISTAKES = (
    AttributeError,
    TypeError,
    LookupError,
    NameError,
    ValueError,
    AssertionError,
    NotImplementedError,
    ImportError,
)

LIBRARIES = {"site-packages", "dist-packages"}
PACKAGE = Path(__file__).resolve().parents[1]
DOCUMENTED = ast.Module | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def is_users(module: str) -> bool:
    """Whether a module of this name is none of this package."""
    return module.partition(".")[0] != "distill"


def find_modules_here(path: str) -> None:
    """Let settings name modules of the working folder from the console script too, as from `python -m distill`.

    Not before one names a module that is none of this package, and not before torch is imported, which runs what
    packages on `sys.path` announce: the working folder may be that of a model which somebody else made.
    """
    if not is_users(path):
        return
    import torch  # noqa: F401

    here = os.getcwd()
    if not sys.flags.safe_path and here not in sys.path and "" not in sys.path:
        sys.path.append(here)  # last, so that no file there hides a package


@contextmanager
def naming_mistakes(what: str, owner: object) -> Iterator[None]:
    """Raises SettingError, which says that `what` fails and in which line, for a mistake in the class of `owner`.

    That is a class of the user's: errors in those of this package stay as they are. So do a lack of memory, and errors
    that end a run on purpose.
    """
    try:
        yield
    except SettingError:
        raise
    except (*MISTAKES, FileNotFoundError, RuntimeError) as error:
        # A shape that does not fit is a RuntimeError of torch; a lost rank and the like are classes of their own.
        ends_the_run = not isinstance(error, (*MISTAKES, FileNotFoundError)) and type(error) is not RuntimeError
        if ends_the_run or is_out_of_memory(error) or not is_users(type(owner).__module__):
            raise
        raise SettingError(f"{what} fails: {mistake(error)}") from error


def mistake(error: BaseException) -> str:
    """The error with the last line of the user's in its traceback, and the attributes of an object of this package."""
    here, site = str(PACKAGE), "site-packages"
    lines = [
        f" ({Path(frame.filename).name}, line {frame.lineno}: {frame.line})"
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith((here, "<")) and site not in frame.filename
    ]
    text = f"{type(error).__name__}: {' '.join(str(error).split())}{lines[-1] if lines else ''}"
    owner = error.obj if isinstance(error, AttributeError) else None
    if owner is None or is_users(type(owner).__module__):
        return text
    names = [name for name in dir(owner) if not name.startswith("_") and not callable(getattr(owner, name, None))]
    return f"{text}; a {type(owner).__name__} has {', '.join(names)}"


def source_digest(path: str) -> str | None:
    """sha256 of the module of an import path, and of the user's modules that it imports, in turn.

    None for what a library defines, this package among them, and where there is no source.
    """
    texts, waiting = dict[str, str](), [path.rpartition(".")[0]]
    while waiting:
        module = waiting.pop()
        if module in texts or (file := _users_file(module)) is None:
            continue
        try:
            state = file.stat()
            texts[module], imported = _read(file, module, state.st_mtime_ns, state.st_size)
        except (OSError, ValueError, SyntaxError):
            continue
        waiting += imported
    return hashlib.sha256(repr(sorted(texts.items())).encode()).hexdigest() if texts else None


def _users_file(module: str) -> Path | None:
    """The file of a module that is none of a library, found without importing anything; None for any other."""
    top, *parts = module.split(".")
    try:
        spec = find_spec(top)
    except (ImportError, ValueError, AttributeError):
        return None
    if spec is None or not _is_users(spec):
        return None
    if not parts:
        return Path(str(spec.origin)) if str(spec.origin).endswith(".py") else None
    bases = [Path(folder).joinpath(*parts) for folder in spec.submodule_search_locations or []]
    files = [file for base in bases for file in (base / "__init__.py", base.with_name(f"{base.name}.py"))]
    return next((file for file in files if file.is_file()), None)


def _is_users(spec: ModuleSpec) -> bool:
    origins = [spec.origin] if spec.has_location else [*(spec.submodule_search_locations or [])]
    paths = [Path(str(origin)).resolve() for origin in origins]
    standard = [Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib")]
    return bool(paths) and not any(
        LIBRARIES.intersection(path.parts) or any(path.is_relative_to(folder) for folder in (PACKAGE, *standard))
        for path in paths
    )


@lru_cache(maxsize=1000)
def _read(file: Path, module: str, modified: int, size: int) -> tuple[str, list[str]]:
    """What a file of this age and size says, without comments and docstrings, and the modules that it may import."""
    tree = ast.parse(file.read_bytes())
    package = module if file.name == "__init__.py" else module.rpartition(".")[0]
    imported = [name for node in ast.walk(tree) for name in _imported(node, package)]
    for node in ast.walk(tree):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node) is not None:
            del node.body[0]
    return ast.unparse(tree), imported


def _imported(node: ast.AST, package: str) -> Iterator[str]:
    """The modules of an import statement; a name that it takes from a module may be a module, too."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        above = package.split(".")[: len(package.split(".")) + 1 - node.level] if node.level else []
        module = ".".join([*above, *([node.module] if node.module else [])])
        yield from (module, *(f"{module}.{alias.name}" for alias in node.names))
