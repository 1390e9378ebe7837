"""A digest of the user's files behind an import path: of the file that defines it, and of those that this imports.

They are read and not run. Comments, docstrings and blank lines do not count.
"""

import ast
import hashlib
import sysconfig
from collections.abc import Iterator
from functools import lru_cache
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path

LIBRARIES = {"site-packages", "dist-packages"}
PACKAGE = Path(__file__).resolve().parents[1]
DOCUMENTED = ast.Module | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


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
