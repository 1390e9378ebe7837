"""Classes and functions of the user's: what went wrong in one, in one line, and a digest of the files behind it."""

import ast
import hashlib
import os
import sys
import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from distill.runtime.errors import SettingError
from distill.runtime.host import is_out_of_memory

# What code raises that takes something for what it is not; memory, storage and signals are none of these.
MISTAKES = (
    *(AttributeError, TypeError, LookupError, NameError, ValueError),
    *(AssertionError, NotImplementedError, ImportError),
)
PACKAGE = Path(__file__).resolve().parents[1]
DOCUMENTED = ast.Module | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
LIBRARIES = {"site-packages", "dist-packages"}


def is_users(module: str) -> bool:
    """Whether a module of this name is none of this package."""
    return module.partition(".")[0] != "distill"


def find_modules_here(path: str) -> None:
    """Let settings name modules of the working folder from the console script too, as from `python -m distill`.

    Not before one names a module that is none of this package, and not before torch is imported, which runs what
    packages on `sys.path` announce: the working folder may be that of a model which somebody else made.
    """
    if is_users(path) and not sys.flags.safe_path and not {"", os.getcwd()}.intersection(sys.path):
        import torch  # noqa: F401

        sys.path.append(os.getcwd())  # last, so that no file there hides a package


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
    except Exception as error:
        # A shape that does not fit is a RuntimeError of torch; a lost rank and the like are classes of their own.
        is_mistake = isinstance(error, (*MISTAKES, FileNotFoundError)) or type(error) is RuntimeError
        if not is_mistake or is_out_of_memory(error) or not is_users(type(owner).__module__):
            raise
        raise SettingError(f"{what} fails: {mistake(error)}") from error


def mistake(error: BaseException) -> str:
    """The error with the last line of the user's in its traceback, and the attributes of an object of this package."""
    lines = [
        f" ({Path(frame.filename).name}, line {frame.lineno}: {frame.line})"
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith((str(PACKAGE), "<")) and "site-packages" not in frame.filename
    ]
    text = f"{type(error).__name__}: {' '.join(str(error).split())}{lines[-1] if lines else ''}"
    owner = error.obj if isinstance(error, AttributeError) else None
    if owner is None or is_users(type(owner).__module__):
        return text
    names = [name for name in dir(owner) if not name.startswith("_") and not callable(getattr(owner, name, None))]
    return f"{text}; a {type(owner).__name__} has {', '.join(names)}"


def source_digest(path: str) -> str | None:
    """sha256 of the module of an import path, and of the user's modules that it imports, in turn.

    Comments and docstrings do not count, and nothing is imported. None for what a library defines, this package among
    them, and where there is no source.
    """
    texts, waiting = dict[str, str](), [path.rpartition(".")[0]]
    while waiting:
        module = waiting.pop()
        if module in texts or (file := _users_file(module)) is None:
            continue
        try:
            tree = ast.parse(file.read_bytes())
        except (OSError, ValueError, SyntaxError):
            continue
        package = module if file.name == "__init__.py" else module.rpartition(".")[0]
        for node in ast.walk(tree):
            waiting += _imported(node, package)
            if isinstance(node, DOCUMENTED) and ast.get_docstring(node) is not None:
                del node.body[0]
        texts[module] = ast.unparse(tree)
    return hashlib.sha256(repr(sorted(texts.items())).encode()).hexdigest() if texts else None


def _users_file(module: str) -> Path | None:
    """The file of a module that is none of a library, found without importing anything; None for any other."""
    top, *parts = module.split(".")
    try:
        spec = find_spec(top) if is_users(top) else None
    except (ImportError, ValueError):  # of the module that a program was started as, say
        spec = None
    if spec is None:
        return None
    bases = [Path(folder, *parts) for folder in spec.submodule_search_locations or []]
    files = [file for base in bases for file in (base / "__init__.py", base.with_name(f"{base.name}.py"))]
    found = next((file for file in files if file.is_file()), None) if bases else Path(str(spec.origin))
    if found is None or found.suffix != ".py" or LIBRARIES.intersection(found.resolve().parts):
        return None
    return None if found.resolve().is_relative_to(Path(sysconfig.get_path("stdlib")).resolve()) else found


def _imported(node: ast.AST, package: str) -> Iterator[str]:
    """The modules of an import statement; a name that it takes from a module may be a module, too."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        above = package.split(".")[: len(package.split(".")) + 1 - node.level] if node.level else []
        module = ".".join([*above, *([node.module] if node.module else [])])
        yield from (module, *(f"{module}.{alias.name}" for alias in node.names))
