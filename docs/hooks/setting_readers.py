"""Which modules read a setting: found in the code, by following everything whose type is a section of the settings."""

import ast
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, get_args

import distill.config.settings  # noqa: F401  which makes all sections
from distill.config.model import Settings

PACKAGE = Path(__file__).resolve().parent.parent.parent / "distill"
Types = frozenset[str]  # names of classes
NONE: Types = frozenset()
# Fields whose annotation leaves open what they hold.
HELD = {
    ("CorpusConfig", "sources"): "SourceConfig",
    ("EvaluateConfig", "sources"): "SourceConfig",
    ("EvaluateConfig", "by_set"): "SetConfig",
}


def readers() -> dict[tuple[str, str], list[str]]:
    """The modules outside of the settings that read a field, by the class that defines it and its name."""
    return Code(sorted(PACKAGE.rglob("*.py"))).readers()


def subclasses(model: type[Settings]) -> Iterator[type[Settings]]:
    """All sections that inherit from `model`."""
    for inner in model.__subclasses__():
        yield inner
        yield from subclasses(inner)


class Code:
    """The classes and functions of the package, as far as it takes to know the types of expressions."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self.trees = {path.relative_to(PACKAGE.parent).as_posix(): ast.parse(path.read_text("utf-8")) for path in paths}
        self.sections = {model.__name__: model for model in subclasses(Settings)}
        self.aliases: dict[str, Types] = {}
        self.classes: dict[str, ast.ClassDef] = {}
        self.attributes: dict[tuple[str, str], Types] = defaultdict(frozenset)  # of objects of a class
        self.returns: dict[str, Types] = defaultdict(frozenset)  # of functions, by their names
        self.reads: dict[tuple[str, str], set[str]] = defaultdict(set)  # field: modules, and methods as `Class.method`
        for tree in self.trees.values():
            self.classes |= {node.name: node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
        for tree in self.trees.values():
            self._read_aliases(tree)
        for tree in self.trees.values():
            for node in ast.walk(tree):
                if isinstance(node, ast.FunctionDef):
                    self.returns[node.name] |= self.named_in(node.returns)
        for node in self.classes.values():
            self._read_attributes(node)
        for _ in range(2):  # what is assigned to `self` in one class decides types in another one
            for module, tree in self.trees.items():
                Following(self, module, "").visit(tree)

    def readers(self) -> dict[tuple[str, str], list[str]]:
        """As the function of this name; a method of a section is read where the method is."""
        found = {}
        for field, places in self.reads.items():
            modules = {place for place in places if place.endswith(".py")}
            for place in places - modules:
                section, _, method = place.partition(".")
                modules |= {place for place in self.reads.get((section, method), ()) if place.endswith(".py")}
            outside = {module for module in modules if not module.startswith("distill/config/")}
            found[field] = sorted(outside or modules)
        return found

    def named_in(self, annotation: ast.expr | None) -> Types:
        """The classes of the package that an annotation names."""
        if annotation is None:
            return NONE
        names: set[str] = set()
        for node in ast.walk(annotation):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                try:
                    names |= self.named_in(ast.parse(node.value, mode="eval").body)
                except SyntaxError:
                    continue
            name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
            names |= self.aliases.get(name, frozenset({name} & self.classes.keys()))
        return frozenset(names)

    def _read_aliases(self, tree: ast.Module) -> None:
        for node in tree.body:
            is_union = isinstance(node, ast.Assign) and isinstance(node.value, ast.BinOp)
            if is_union and isinstance(node.targets[0], ast.Name) and (named := self.named_in(node.value)):
                self.aliases[node.targets[0].id] = named

    def _read_attributes(self, node: ast.ClassDef) -> None:
        for inner in node.body:
            if isinstance(inner, ast.AnnAssign) and isinstance(inner.target, ast.Name):
                self.attributes[node.name, inner.target.id] = self.named_in(inner.annotation)
            elif isinstance(inner, ast.FunctionDef):
                own = frozenset({node.name}) if "Self" in ast.unparse(inner.returns or ast.Constant("")) else NONE
                self.attributes[node.name, inner.name] = self.named_in(inner.returns) | own
        if (section := self.sections.get(node.name)) is not None:
            for name, field in section.model_fields.items():
                held = HELD.get((node.name, name))
                self.attributes[node.name, name] = frozenset({held} if held else _models_in(field.annotation))

    def bases(self, name: str) -> Iterator[str]:
        """A class and those that it inherits from."""
        yield name
        node = self.classes.get(name)
        for base in node.bases if node is not None else ():
            inner = base.value if isinstance(base, ast.Subscript) else base
            if isinstance(inner, ast.Name) and inner.id != name:
                yield from self.bases(inner.id)

    def attribute(self, of: Types, name: str, place: str) -> Types:
        """The types of an attribute; where it is a field or a method of a section, `place` reads it."""
        found: set[str] = set()
        for cls in of:
            for base in self.bases(cls):
                section = self.sections.get(base)
                if section is not None and (name in vars(section).get("__annotations__", {}) or name in vars(section)):
                    self.reads[base, name].add(place)
                found |= self.attributes.get((base, name), NONE)
        return frozenset(found)


def _models_in(annotation: Any) -> Iterator[str]:
    """The names of the sections that a field may hold, in a dict or list too."""
    if isinstance(annotation, type) and issubclass(annotation, Settings):
        yield annotation.__name__
    for inner in get_args(annotation):
        yield from _models_in(inner)


class Following(ast.NodeVisitor):
    """Follows the types of names through the functions of a module."""

    def __init__(
        self, code: Code, module: str, cls: str, names: dict[str, Types] | None = None, place: str = ""
    ) -> None:
        self.code, self.module, self.cls = code, module, cls
        self.names = dict(names or {})
        self.place = place or module

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for inner in node.body:
            Following(self.code, self.module, node.name, self.names).visit(inner)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        is_section = self.cls in self.code.sections
        inner = Following(self.code, self.module, self.cls, self.names, f"{self.cls}.{node.name}" if is_section else "")
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        for argument in arguments:
            inner.names[argument.arg] = self.code.named_in(argument.annotation)
        if self.cls and arguments and arguments[0].arg in ("self", "cls"):
            inner.names[arguments[0].arg] = frozenset({self.cls})
        for statement in node.body:
            inner.visit(statement)

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self.visit(node.body)

    def visit_Assign(self, node: ast.Assign) -> None:
        self.generic_visit(node)
        for target in node.targets:
            self._assign(target, node.value)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self.generic_visit(node)
        self._bind(node.target, self.code.named_in(node.annotation))

    def visit_NamedExpr(self, node: ast.NamedExpr) -> None:
        self._bind(node.target, self.types(node.value))
        self.generic_visit(node)

    def visit_For(self, node: ast.For) -> None:
        self._bind_all(node.target, self.types(node.iter))
        self.generic_visit(node)

    def visit_With(self, node: ast.With) -> None:
        for item in node.items:
            if item.optional_vars is not None:
                self._bind_all(item.optional_vars, self.types(item.context_expr))
        self.generic_visit(node)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        self._bind_all(node.target, self.types(node.iter))
        self.generic_visit(node)

    def visit_ListComp(self, node: ast.ListComp) -> None:
        self._comprehension(node, node.elt)

    def visit_SetComp(self, node: ast.SetComp) -> None:
        self._comprehension(node, node.elt)

    def visit_GeneratorExp(self, node: ast.GeneratorExp) -> None:
        self._comprehension(node, node.elt)

    def visit_DictComp(self, node: ast.DictComp) -> None:
        self._comprehension(node, node.key, node.value)

    def _comprehension(
        self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp, *parts: ast.expr
    ) -> None:
        for generator in node.generators:
            self.visit(generator)
        for part in parts:
            self.visit(part)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self.types(node)
        self.visit(node.value)

    def visit_Call(self, node: ast.Call) -> None:
        """`getattr(settings, "name")` reads, too."""
        self.generic_visit(node)
        if isinstance(node.func, ast.Name) and node.func.id == "getattr" and isinstance(node.args[1], ast.Constant):
            self.code.attribute(self.types(node.args[0]), str(node.args[1].value), self.place)

    def types(self, node: ast.expr | None) -> Types:
        """The classes that an expression, or what it holds, may be of."""
        if isinstance(node, ast.Name):
            return self.names.get(node.id, NONE)
        if isinstance(node, ast.Attribute):
            return self.code.attribute(self.types(node.value), node.attr, self.place)
        if isinstance(node, ast.Call):
            return self._called(node)
        if isinstance(node, ast.Subscript | ast.Starred | ast.Await):
            return self.types(node.value)
        if isinstance(node, ast.IfExp):
            return self.types(node.body) | self.types(node.orelse)
        if isinstance(node, ast.BoolOp):
            return frozenset().union(*map(self.types, node.values))
        if isinstance(node, ast.Tuple | ast.List):
            return frozenset().union(*map(self.types, node.elts))
        if isinstance(node, ast.NamedExpr):
            return self.types(node.value)
        return NONE

    def _called(self, node: ast.Call) -> Types:
        function = node.func
        if isinstance(function, ast.Name):
            if function.id in self.code.classes:
                return frozenset({function.id})
            if function.id in (
                "replace",
                "cast",
                "enumerate",
                "sorted",
                "list",
                "zip",
                "reversed",
                "iter",
                "next",
                "copy",
            ):
                return frozenset().union(*map(self.types, node.args))
            return self.code.returns.get(function.id, NONE)
        if isinstance(function, ast.Attribute):
            of = self.types(function.value)
            if function.attr in ("values", "items", "get", "copy", "enter_context"):
                return of or frozenset().union(*map(self.types, node.args))
            return self.types(function) or (of and NONE) or self.code.returns.get(function.attr, NONE)
        return NONE

    def _assign(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
            for one, part in zip(target.elts, value.elts, strict=True):
                self._assign(one, part)
        else:
            self._bind_all(target, self.types(value))

    def _bind_all(self, target: ast.expr, types: Types) -> None:
        for node in target.elts if isinstance(target, ast.Tuple | ast.List) else [target]:
            if isinstance(node, ast.Tuple | ast.List):
                self._bind_all(node, types)
            else:
                self._bind(node, types)

    def _bind(self, target: ast.expr, types: Types) -> None:
        if isinstance(target, ast.Name):
            self.names[target.id] = types
        elif isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id == "self":
            self.code.attributes[self.cls, target.attr] |= types
