"""The JSON schema of the settings: every recipe is written by it, and it has range, unit and sentence of each field."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from job import distill
from pydantic import BaseModel

from distill.config.errors import models_of
from distill.config.schema import INTERNAL, settings_schema
from distill.config.settings import RECIPES, Config

SCHEMA = settings_schema()


def resolved(schema: dict[str, Any]) -> dict[str, Any]:
    return resolved(SCHEMA["$defs"][schema["$ref"].rpartition("/")[2]]) if "$ref" in schema else schema


def strangers(schema: dict[str, Any], value: Any, path: str = "") -> Iterator[str]:
    """The keys of a recipe that the schema does not know."""
    schema = resolved(schema)
    if "anyOf" in schema and isinstance(value, dict):
        kinds = [resolved(kind) for kind in schema["anyOf"]]
        kinds = [kind for kind in kinds if kind.get("type") == "object" and set(kind.get("required", ())) <= set(value)]
        yield from min(([*strangers(kind, value, path)] for kind in kinds), key=len)
    for name, inner in value.items() if isinstance(value, dict) and schema.get("type") == "object" else ():
        further = schema.get("additionalProperties", True)
        known = schema.get("properties", {}).get(name, further)
        if isinstance(known, dict):
            yield from strangers(known, inner, f"{path}.{name}")
        elif not known:
            yield f"{path}.{name}"


MEMBERS = {"a": {"path": "x", "weight": 2.0}, "b": {"path": "bundled_small"}}
MADE = [
    ({"train": {"stepz": 1}}, [".train.stepz"]),
    ({"student": {"init": "random", "layerz": [0]}}, [".student.layerz"]),
    ({"teacher": {"pth": "x"}}, [".teacher.pth"]),
    ({"student": {"_target_": "mine.make", "width": 3}}, []),
    ({"teacher": {"members": MEMBERS}}, []),
]


@pytest.mark.parametrize(
    ("content", "found"), [*((yaml.safe_load(f.read_text()), []) for f in RECIPES.glob("*.yaml")), *MADE]
)
def test_recipes_are_written_by_it(content: Any, found: list[str]) -> None:
    assert list(strangers(SCHEMA, content)) == found


def sections(model: type[BaseModel]) -> Iterator[type[BaseModel]]:
    yield model
    for field in model.model_fields.values():
        for inner in models_of(field.annotation):
            yield from sections(inner)


def test_every_field_has_its_sentence_and_the_command_prints_all(capsys: Any) -> None:
    for model in sections(Config):
        for name, field in model.model_fields.items():
            text = field.description or ""
            assert text.endswith(".") and "\n" not in text and len(text) < 130, f"{model.__name__}.{name}: {text}"
    assert distill("--schema") == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == SCHEMA
    steps = printed["$defs"]["TrainConfig"]["properties"]["steps"]
    assert "1000000000" in json.dumps(steps) and steps["unit"] == "steps" and "ends" in steps["description"]
    assert not set(INTERNAL) & set(printed["properties"])
