"""The schema of results.json as Markdown, for reference/record.md: from the descriptions that its fields have."""

import json
import re
from typing import Any

from markdown_text import escaped, paragraphs

from distill.runs.record import Record

SCORES = "Scores by evaluation set, one key for each measure, such as `perplexity`."
REFERENCE = re.compile(r'"#/\$defs/(\w+)"')


def text() -> str:
    """The page as Markdown."""
    schema = Record.model_json_schema()
    parts = {"Record": schema, **schema["$defs"]}
    names, blocks = ["Record"], list[str]()
    for name in names:
        part = {key: parts[name].get(key) for key in ("properties", "additionalProperties", "description")}
        title = "The whole record" if name == "Record" else name
        rows = ["| key | value | what it is |", "| --- | --- | --- |"]
        for key, node in part["properties"].items():
            rows.append(f"| `{key}` | {_kind(node)} | {escaped(node['description'])} |".replace("||", r"\|\|"))
        if part["additionalProperties"]:
            rows.append(f"| `MEASURE` | {_kind(part['additionalProperties'])} | {SCORES} |")
        blocks += [f"## {title} {{ #{name} }}", *paragraphs(part["description"]), "\n".join(rows)]
        names += [each for each in dict.fromkeys(REFERENCE.findall(json.dumps(part))) if each not in names]
    return "\n\n".join(blocks) + "\n"


def _kind(node: Any) -> str:
    """A type in the words of JSON, with links to the parts; null goes without saying."""
    if node in (True, {}):
        return "any value"
    if "$ref" in node:
        name = node["$ref"].rpartition("/")[2]
        return f"[{name}](#{name})"
    if "anyOf" in node:
        return " or ".join(_kind(inner) for inner in node["anyOf"] if inner != {"type": "null"})
    if node.get("type") == "array":
        return f"array of {_kind(node['items'])}"
    if node.get("type") == "object":
        return f"object of {_kind(node['additionalProperties'])}"
    return str(node.get("type", "any value"))
