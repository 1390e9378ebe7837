"""A digest of the source behind an import path of the user's, with all of the user's files that it uses.

It is read from the files, and none of that runs: the expression of a constant counts, not the value that it has on one
host. Comments, docstrings and whatever else a file holds do not count.
"""

import ast
import hashlib
import sysconfig
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

Definition = tuple[str, str]  # of a module: its name, and one of its names
LIBRARIES = {"site-packages", "dist-packages"}
PACKAGE = Path(__file__).resolve().parents[1]
DOCUMENTED = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


class _Import(NamedTuple):
    """One name of an import statement."""

    local: str  # as the code calls it, such as `F`, or `a.b` of `import a.b`
    module: str
    name: str  # in that module; empty for the module itself

    @property
    def target(self) -> str:
        return f"{self.module}.{self.name}".strip(".")


def source_digest(path: str) -> str | None:
    """sha256 of what defines an import path, and of what that uses of the user's files, in turn.

    None for what a library defines, this package among them, and where there is no source.
    """
    module, _, name = path.rpartition(".")
    texts, trees = dict[Definition, str](), dict[Path, ast.Module]()
    waiting: list[Definition] = [(module, name)]
    while waiting:
        module, name = definition = waiting.pop()
        if definition in texts or (file := _users_file(module)) is None:
            continue
        try:
            tree = trees[file] = trees.get(file) or _parsed(file)
        except (OSError, ValueError, SyntaxError):
            continue
        package = module if file.name == "__init__.py" else module.rpartition(".")[0]
        texts[definition], used = _definition(tree, name, package)
        waiting += used
    return hashlib.sha256(repr(sorted(texts.items())).encode()).hexdigest() if any(texts.values()) else None


def is_users_module(module: str) -> bool:
    """Whether a module, or the program or notebook itself, is none of a library."""
    return module == "__main__" or _users_file(module) is not None


def _users_file(module: str) -> Path | None:
    """The file of a module that is none of a library; None for any other."""
    top = module.partition(".")[0]
    try:
        if not top or not _is_users(find_spec(top)):  # before a library imports its parts for it
            return None
        spec = find_spec(module)
    except Exception:  # of whatever kind the package around it raises when it is imported
        return None
    return Path(str(spec.origin)) if spec is not None and str(spec.origin).endswith(".py") else None


def _is_users(spec: ModuleSpec | None) -> bool:
    if spec is None:
        return False
    origins = [spec.origin] if spec.has_location else [*(spec.submodule_search_locations or [])]
    paths = [Path(str(origin)).resolve() for origin in origins]
    standard = [Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib")]
    return bool(paths) and not any(
        LIBRARIES.intersection(path.parts) or any(path.is_relative_to(folder) for folder in (PACKAGE, *standard))
        for path in paths
    )


def _parsed(file: Path) -> ast.Module:
    tree = ast.parse(file.read_bytes())
    for node in ast.walk(tree):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node) is not None:
            del node.body[0]
    return tree


def _definition(tree: ast.Module, name: str, package: str) -> tuple[str, list[Definition]]:
    """The statements of a module that define a name, and those that these use; and what they use of other modules."""
    statements = [node for node in tree.body if not isinstance(node, ast.Import | ast.ImportFrom)]
    at_top = [one for node in tree.body for one in _imports(node, package)]
    imported = {one.local: one for one in at_top}
    starred = [one.module for one in at_top if one.name == "*"]
    names, used = {name}, list[ast.stmt]()
    while True:
        used = [node for node in statements if names & {*_bound(node)}]
        more = {node.id for statement in used for node in ast.walk(statement) if isinstance(node, ast.Name)}
        if more <= names:
            break
        names |= more
    within = [one for statement in used for node in ast.walk(statement) for one in _imports(node, package)]
    taken = [one for local, one in imported.items() if local.partition(".")[0] in names]
    parts = {ast.unparse(node) for statement in used for node in ast.walk(statement) if isinstance(node, ast.Attribute)}
    texts = [ast.unparse(statement) for statement in used] + sorted(f"{one.local} is {one.target}" for one in taken)
    uses = [(one.module, one.name) for one in (*taken, *within) if one.name]
    uses += [(module, used_name) for module in starred for used_name in sorted(names)]
    uses += [
        (one.target, part.removeprefix(f"{one.local}.").partition(".")[0])
        for one in (*taken, *within)
        for part in sorted(parts)
        if part.startswith(f"{one.local}.")
    ]
    return "\n".join(texts), uses


def _bound(statement: ast.stmt) -> Iterator[str]:
    """The names that a statement gives its module."""
    if isinstance(statement, DOCUMENTED):
        yield statement.name
        return
    for node in ast.walk(statement):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, DOCUMENTED):
            yield node.name
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from ((alias.asname or alias.name).partition(".")[0] for alias in node.names)


def _imports(node: ast.AST, package: str) -> Iterator[_Import]:
    if isinstance(node, ast.Import):
        yield from (_Import(alias.asname or alias.name, alias.name, "") for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        above = package.split(".")[: len(package.split(".")) + 1 - node.level] if node.level else []
        module = ".".join([*above, *([node.module] if node.module else [])])
        yield from (_Import(alias.asname or alias.name, module, alias.name) for alias in node.names)
