"""All settings as Markdown, for reference/settings.md: sentence, default and values, from their JSON schema."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import yaml
from markdown_text import comment_of, escaped, paragraphs

from distill.config import CONF
from distill.config.base import flatten
from distill.config.component import OPTIMIZERS, SCHEDULES, SOURCES, TABLES, TERMS, class_name, kinds
from distill.config.schema import arguments_of, settings_schema

ALONE = ("seed", "resume", "optimize", "observers")  # settings that are in no section
HYDRA = {
    "hydra.run.dir": {"description": "The folder of the run.", "default": "runs/RECIPE", "type": "string"},
    "hydra.sweep.dir": {"description": "The folder of a sweep.", "default": "runs/RECIPE-sweep", "type": "string"},
}
OPEN = ("Named", "SourceConfig", "MixedSourceConfig")  # what is described elsewhere on the page
KINDS = {  # by section: a title, the package of the kinds, and which
    "corpus": [("Kinds of text", SOURCES, kinds(SOURCES)), ("Kinds of labelled examples", TABLES, kinds(TABLES))],
    "objective": [("Tasks", "distill.tasks", kinds("distill.tasks"))],
    "optimizer": [("Optimizers", OPTIMIZERS, kinds(OPTIMIZERS))],
    "schedule": [("Schedules", SCHEDULES, kinds(SCHEDULES))],
    "backend": [("Backends", "distill.distributed", ("single", "ddp", "fsdp", "horovod"))],
}
SENTENCES = {  # where the schema has none
    "chain.given": "Values that the stages refer to as `${chain.given.NAME}`.",
    "objective.NAME.kind": "A loss of this page, where it has another name.",
}
BOUNDS = {"minimum": "at least", "exclusiveMinimum": "above", "maximum": "at most", "exclusiveMaximum": "below"}
TYPES = {"string": "text", "boolean": "`true` or `false`", "null": "`null`", "array": "a list", "object": "settings"}


@dataclass(frozen=True)
class Entry:
    """A setting and what the schema has of it."""

    name: str
    node: dict[str, Any]


@dataclass
class SettingsPage:
    """The page, and the entries that it has after `text` has made it."""

    schema: dict[str, Any] = field(default_factory=settings_schema)
    entries: list[Entry] = field(default_factory=list)

    def text(self) -> str:
        """The page as Markdown."""
        return "\n".join(self._lines()) + "\n"

    def _lines(self) -> Iterator[str]:
        properties = self.schema["properties"]
        yield "## Of a run\n"
        for name in ALONE:
            yield from self._entry(name, properties[name])
        for name, node in HYDRA.items():
            yield from self._entry(name, node)
        for name in properties:
            if name not in (*ALONE, "defaults", "hydra"):
                yield f"## {name}\n\n{escaped(properties[name].get('description', ''))}\n"
                yield from _options(name)
                yield from self._settings(name, properties[name])
                for title, package, names in KINDS.get(name, ()):
                    yield from _described(title, package, names)

    def _settings(self, name: str, node: dict[str, Any]) -> Iterator[str]:
        """The entries of a section, of what it holds, or of one setting."""
        inner = self._group(node)
        if inner is None:
            yield from self._entry(name, node)
            return
        settings = dict(inner.get("properties", {}))
        if name == "corpus":
            tables = [arguments_of(TABLES, kind) for kind in kinds(TABLES)]
            settings = {key: table[key] for table in tables for key in table} | settings
        if name == "teacher.members.NAME":  # and those of `teacher`
            settings = {key: settings[key] for key in ("weight", "precision")}
        if name.removeprefix("objective.") in kinds(TERMS):
            yield from _term(name.removeprefix("objective."))
            settings = arguments_of(TERMS, name.removeprefix("objective."))
            if "temperature" in settings:
                settings["temperature"] |= {"default": "that of objective.temperature"}
        for key, child in settings.items():
            yield from self._settings(f"{name}.{key}", child)
        if self._group(inner.get("additionalProperties")):
            yield from self._settings(f"{name}.NAME", inner["additionalProperties"])

    def _group(self, node: Any) -> dict[str, Any] | None:
        """The schema of the settings that a node holds; None where it is a value, or described elsewhere."""
        if not isinstance(node, dict):
            return None
        name = node.get("$ref", "").rpartition("/")[2]
        if name:
            return None if name in OPEN else self._group(self.schema["$defs"][name])
        if "properties" in node or self._group(node.get("additionalProperties")):
            return node
        return next(filter(None, map(self._group, node.get("anyOf", ()))), None)

    def _entry(self, name: str, node: dict[str, Any]) -> Iterator[str]:
        node = {"description": SENTENCES.get(name, "")} | node
        self.entries.append(Entry(name, node))
        values = " or ".join(dict.fromkeys(filter(None, self._values(node, node.get("unit", ""))))) or "any value"
        default = f"Default: `{_yaml(node['default'])}`." if node.get("default", "???") != "???" else "No default."
        yield f"### `{name}` {{ #{name} }}\n\n{escaped(node['description'])}\n"
        yield f"{default} Takes {values}.\n{{ .facts }}\n"

    def _values(self, node: dict[str, Any], unit: str) -> Iterator[str]:
        """What a setting takes, in words."""
        if "$ref" in node:
            name = node["$ref"].rpartition("/")[2]
            schedule = "a schedule `{start: NUMBER, end: NUMBER, shape: linear or cosine}`"
            yield from [schedule] if name == "WeightSchedule" else self._values(self.schema["$defs"][name], unit)
            return
        inner = next((node[key] for key in ("anyOf", "oneOf", "allOf") if key in node), None)
        if inner is not None:
            yield ", ".join(dict.fromkeys(value for each in inner for value in self._values(each, unit)))
        elif "enum" in node or "const" in node:
            yield ", ".join(f"`{_yaml(value)}`" for value in node.get("enum", [node.get("const")]))
        elif node.get("type") in ("integer", "number"):
            bounds = [f"{word} {_number(node[key])}" for key, word in BOUNDS.items() if key in node]
            kind = "a whole number" if node["type"] == "integer" else "a number"
            yield " ".join(filter(None, [kind, " and ".join(bounds), unit]))
        elif "pattern" not in node:  # that of references, which every number may be
            yield TYPES.get(str(node.get("type")), "")


def _options(group: str) -> Iterator[str]:
    """The options of a group, by the comments of their files or else by what they set."""
    for file in sorted((CONF / group).glob("*.yaml")):
        values = flatten(yaml.safe_load(file.read_text("utf-8")) or {})
        sets = ", ".join(f"`{group}.{name}={_yaml(value)}`" for name, value in values.items() if name != "defaults")
        yield f"`{group}={file.stem}`\n:   {comment_of(file) or f'Sets {sets}.'}\n"


def _described(title: str, package: str, names: Any) -> Iterator[str]:
    """Modules by what their docstrings begin with."""
    yield f"### {title}\n"
    for name in names:
        takes = ", ".join(f"`{setting}`" for setting in arguments_of(package, name)) if package == TABLES else ""
        reads = f" Reads {takes}." if takes else ""
        yield f"`{name}`\n:   {paragraphs(import_module(f'{package}.{name}').__doc__)[0]}{reads}\n"


def _term(kind: str) -> Iterator[str]:
    """The heading of a loss, with its class's docstring."""
    cls = getattr(import_module(f"{TERMS}.{kind}"), class_name(kind))
    yield f"### `objective.{kind}` {{ #objective.{kind} }}\n"
    yield from (f"{text}\n" for text in paragraphs(cls.__doc__))


def _number(value: float) -> str:
    return "2^63 - 1" if value == 2**63 - 1 else f"{value:,.0f}" if value == int(value) else f"{value:g}"


def _yaml(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value).replace("'", "")
