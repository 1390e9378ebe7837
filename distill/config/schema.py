"""The JSON schema of all settings as a recipe writes them: an editor completes and checks YAML by it."""

import json
from typing import Any

from distill.config.component import OPTIMIZERS, SCHEDULES, SOURCES, TABLES, TARGET, TERMS, Component, built_in, kinds
from distill.config.data import HELDOUT, MIXTURE
from distill.config.settings import ChainConfig, Config

REFERENCE = {"type": "string", "pattern": r"^\$\{"}  # to another setting, whose value it takes
INTERNAL = ("written", "compared", "_group_")


def settings_schema() -> dict[str, Any]:
    """The schema of a recipe: any part of the settings, the options of their groups, and Hydra's own part."""
    schema = Config.model_json_schema(by_alias=True)
    chain = ChainConfig.model_json_schema(by_alias=True)
    definitions = schema.pop("$defs") | chain.pop("$defs") | {"ChainConfig": chain}
    chain["properties"]["given"] = {"type": "object"}  # values that the stages refer to
    for definition in (schema, *definitions.values()):
        definition.pop("required", None)
        for name in INTERNAL:
            definition.get("properties", {}).pop(name, None)
    for name in ("CorpusConfig", "SourceConfig", "MixedSourceConfig"):
        definitions[name]["properties"]["kind"]["enum"] = [*kinds(SOURCES), *kinds(TABLES), HELDOUT, MIXTURE]
    for name, package in (("OptimizerConfig", OPTIMIZERS), ("ScheduleConfig", SCHEDULES)):
        properties = definitions[name]["properties"]
        properties["kind"]["enum"] = kinds(package)
        for kind in kinds(package):
            definitions[name]["properties"] = properties = arguments_of(package, kind) | properties
    term = definitions["TermConfig"]["properties"]
    term["kind"] = {"enum": kinds(TERMS)}
    for kind in kinds(TERMS):
        of_kind = {"type": "object", "properties": arguments_of(TERMS, kind) | term, "additionalProperties": False}
        definitions["ObjectiveConfig"]["properties"][kind] = of_kind
    for name in ("StudentConfig", "TeacherConfig", "MemberConfig"):  # a callable of the user's alone takes others
        of_users = definitions[name] | {"required": [TARGET]}
        definitions[name] = {"anyOf": [definitions[name] | {"additionalProperties": False}, of_users]}
    schema["properties"] |= {
        "defaults": {"type": "array"},
        "hydra": {"type": "object"},
        "chain": {"$ref": "#/$defs/ChainConfig"},
    }
    whole = {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "$defs": definitions}
    referring: dict[str, Any] = _with_references(whole)
    return referring


def arguments_of(package: str, kind: str) -> dict[str, Any]:
    """The settings of what a kind names, by the signature of its class."""
    schema = Component("", built_in(package, kind)).schema().model_json_schema()
    definitions = schema.get("$defs", {})

    def whole(node: Any) -> Any:
        """With what it refers to in its place."""
        if isinstance(node, list):
            return [whole(inner) for inner in node]
        if not isinstance(node, dict):
            return node
        if "$ref" in node:
            node = definitions[node["$ref"].rpartition("/")[2]] | {k: v for k, v in node.items() if k != "$ref"}
        return {name: whole(inner) for name, inner in node.items()}

    return {name: whole(node) for name, node in schema.get("properties", {}).items()}


def print_schema() -> None:
    """Write the schema to stdout, for `python -m distill --schema > distill.schema.json`."""
    print(json.dumps(settings_schema(), indent=1))


def _with_references(schema: Any) -> Any:
    """The same schema, where a number, a truth value or a list may also be taken from another setting."""
    if isinstance(schema, list):
        return [_with_references(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    converted = {name: _with_references(value) for name, value in schema.items()}
    if converted.get("type") in ("integer", "number", "boolean", "array"):
        outer = {name: converted.pop(name) for name in ("description", "default", "unit", "title") if name in converted}
        return {**outer, "anyOf": [converted, REFERENCE]}
    return converted
