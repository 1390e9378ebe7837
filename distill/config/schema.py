"""The JSON schema of all settings as a recipe writes them: an editor completes and checks YAML by it."""

import importlib
import inspect
import json
import re
from collections.abc import Iterator
from typing import Any, get_type_hints

from pydantic import BaseModel, TypeAdapter
from pydantic.errors import PydanticUserError
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import to_jsonable_python

from distill.config.chain import ChainConfig
from distill.config.component import OPTIMIZERS, SCHEDULES, SOURCES, TABLES, TERMS, built_in, class_name, kinds
from distill.config.corpus import SourceConfig
from distill.config.evaluate import SetConfig
from distill.config.mixture_settings import HELDOUT, MIXTURE
from distill.config.settings import Config
from distill.config.student import STUDENTS
from distill.config.teacher import MEMBERS, TEACHERS
from distill.config.unions import CUSTOM

DEFINITIONS = "#/$defs/{model}"
TARGET = {"_target_": {"type": "string", "description": "Import path of a callable of yours, in place of kind."}}
REFERENCE = {"type": "string", "pattern": r"^\$\{"}  # to another setting, whose value it takes
PASSED = ("self", "params", "lr", "total_steps", "peak_lr")  # arguments that the run gives to what a kind names
INTERNAL = ("custom", "make", "terms", "source", "weights", "written", "compared")


def settings_schema() -> dict[str, Any]:
    """The schema of a recipe: any part of the settings, the options of their groups, and Hydra's own part."""
    models: list[type[BaseModel]] = [Config, ChainConfig, SourceConfig, SetConfig]
    generator = GenerateJsonSchema(ref_template=DEFINITIONS)
    inputs = [(model, "validation", model.__pydantic_core_schema__) for model in models]
    definitions: dict[str, Any] = dict(generator.generate_definitions(inputs)[1])  # type: ignore[arg-type]
    for definition in definitions.values():
        definition.pop("required", None)
        for name in INTERNAL:
            definition.get("properties", {}).pop(name, None)
    _open_groups(definitions)
    definitions["ChainConfig"]["properties"]["given"] = {"type": "object"}  # values that the stages refer to
    top = definitions.pop("Config")
    top["properties"]["observers"] |= {
        "type": "object", "additionalProperties": {"type": "object", "properties": TARGET}
    }  # fmt: skip
    top["properties"] |= {
        "defaults": {"type": "array"},
        "hydra": {"type": "object"},
        "chain": _reference("ChainConfig"),
    }
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **top, "$defs": definitions}
    return _with_references(schema)


def described(schema: dict[str, Any], name: str) -> tuple[str, str]:
    """The unit and the sentence of a setting by its dotted name; each is empty where the schema has none."""
    nodes = [schema]
    for part in name.split("."):
        nodes = [inner for node in nodes for inner in _below(schema, node, part)]
    parts = [(node.get("unit", ""), node["description"]) for node in nodes if "description" in node]
    return parts[0] if parts else ("", "")


def _below(schema: dict[str, Any], node: dict[str, Any], name: str) -> Iterator[dict[str, Any]]:
    """What the schema says of the entry `name` of a node, in each of the forms that this may have."""
    if (reference := node.get("$ref")) is not None:
        yield from _below(schema, schema["$defs"][reference.rpartition("/")[2]], name)
    for form in (form for key in ("anyOf", "allOf", "oneOf") for form in node.get(key, ())):
        yield from _below(schema, form, name)
    if name in (properties := node.get("properties", {})):
        yield properties[name]
    elif isinstance(additional := node.get("additionalProperties"), dict):
        yield additional


def print_schema() -> int:
    """Write the schema to stdout, for `python -m distill --schema > distill.schema.json`; gives exit status 0."""
    print(json.dumps(settings_schema(), indent=1))
    return 0


def _open_groups(definitions: dict[str, Any]) -> None:
    """Write the groups as a recipe does: flat, with the settings of their kinds and names of the user's own."""
    source, corpus = definitions["SourceConfig"], definitions["CorpusConfig"]
    source["properties"]["kind"]["enum"] = [*kinds(SOURCES), *kinds(TABLES), HELDOUT, MIXTURE]
    source["properties"] |= TARGET | {"weight": {"type": "number", "description": "Weight in a mixture."}}
    source["additionalProperties"] = True  # those of tables and of the user's own sources
    corpus["properties"] = {**source["properties"], **corpus["properties"]}
    corpus["properties"]["sources"] = _named("SourceConfig", "Sources of a mixture by name.")
    corpus["additionalProperties"] = True
    evaluate = definitions["EvaluateConfig"]["properties"]
    evaluate["sources"] = _named("SourceConfig", "Where the text of each set comes from, by its name.")
    evaluate["by_set"] = _named("SetConfig", "What of one set is scored, by its name.")
    evaluate["measures"] |= {"type": "object", "additionalProperties": {"type": "object", "properties": TARGET}}
    for kinds_of_model in (STUDENTS, TEACHERS, MEMBERS):
        for section in kinds_of_model.classes:
            if CUSTOM in section.model_fields:
                model = definitions[section.__name__]
                del model["properties"][kinds_of_model.by]
                # And settings of the user's own callable.
                model |= {
                    "properties": model["properties"] | TARGET,
                    "required": list(TARGET),
                    "additionalProperties": True,
                }
    objective, weight = definitions["ObjectiveConfig"], definitions.pop("TermConfig")["properties"]["weight"]
    shared = {"weight": weight, "kind": {"enum": kinds(TERMS)}, **TARGET}
    for kind in kinds(TERMS):
        objective["properties"][kind] = {"type": "object", "properties": shared | arguments_of(TERMS, kind)}
    objective["additionalProperties"] = {"type": "object", "properties": shared}
    definitions["OptimizerConfig"] |= _by_kind(OPTIMIZERS, definitions["OptimizerConfig"]["properties"])
    definitions["Component"] = _by_kind(SCHEDULES, {})  # the only one that is left is the schedule


def _by_kind(package: str, properties: dict[str, Any]) -> dict[str, Any]:
    """A group whose `kind` names a file of a package, with the arguments of all of them."""
    for kind in kinds(package):
        properties = arguments_of(package, kind) | properties
    kind_of = {"enum": kinds(package), "description": f"A file of {package.replace('.', '/')}/."}
    properties = {"kind": kind_of, **TARGET, **properties}
    return {"type": "object", "properties": properties, "additionalProperties": True}


def arguments_of(package: str, kind: str) -> dict[str, Any]:
    """The settings of what a kind names, by the signature of its class."""
    target = getattr(importlib.import_module(f"{package}.{kind}"), class_name(kind))
    assert f"{target.__module__}.{target.__name__}" == built_in(package, kind)
    hints, arguments = get_type_hints(target.__init__), {}
    for name, parameter in inspect.signature(target).parameters.items():
        if name in PASSED:
            continue
        try:
            arguments[name] = TypeAdapter(hints.get(name, Any)).json_schema()
        except PydanticUserError:
            arguments[name] = {}
        if parameter.default is not parameter.empty:
            arguments[name]["default"] = to_jsonable_python(parameter.default)
        if (sentence := _sentence(target, name)) is not None:
            arguments[name]["description"] = sentence
    return arguments


def _sentence(target: type, name: str) -> str | None:
    """What the docstrings of a class say of an argument: `name`: a sentence."""
    for kind in inspect.getmro(target):
        for text in (kind.__dict__.get("__doc__"), getattr(kind.__dict__.get("__init__"), "__doc__", None)):
            if match := re.search(rf"`{name}`:\s+(.+?)\.(?:\s|$)", text or "", re.DOTALL):
                sentence = " ".join(match[1].split())
                return f"{sentence[0].upper()}{sentence[1:]}."
    return None


def _reference(model: str) -> dict[str, str]:
    return {"$ref": DEFINITIONS.format(model=model)}


def _named(model: str, description: str) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": _reference(model), "description": description}


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
