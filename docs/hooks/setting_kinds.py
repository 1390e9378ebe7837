"""Which values a setting takes and what its default is, in words, from its JSON schema."""

from typing import Any

BYTES = ((1 << 50, "PiB"), (1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"))


def shown_default(node: dict[str, Any]) -> str | None:
    """The default as YAML writes it; None where a value has to be given."""
    if "default" not in node or node["default"] == "???":
        return None
    return _written(node["default"])


def accepted(schema: dict[str, Any], node: dict[str, Any], limits: str = "") -> str:
    """The values that a setting takes, in words.

    Args:
        schema: that of all settings, whose definitions the node refers to.
        limits: the range of a number that may follow a schedule, which JSON schemas do not have.
    """
    parts = list(dict.fromkeys(_forms(schema, node, node.get("unit", ""), limits)))
    return " or ".join(filter(None, [", ".join(parts[:-1]), parts[-1]])) if parts else "any value"


def _forms(schema: dict[str, Any], node: dict[str, Any], unit: str, limits: str) -> list[str]:
    if "$ref" in node:
        name = node["$ref"].rpartition("/")[2]
        if name == "WeightSchedule":
            return ["a schedule `{start: NUMBER, end: NUMBER, shape: linear or cosine}`"]
        node = schema["$defs"][name]
    for key in ("anyOf", "oneOf", "allOf"):
        if key in node:
            return [form for inner in node[key] for form in _forms(schema, inner, unit, limits)]
    if "const" in node:
        return [f"`{_written(node['const'])}`"]
    if "enum" in node:
        return [f"`{_written(value)}`" for value in node["enum"]]
    kind = node.get("type")
    if kind in ("integer", "number"):
        return [_range(node, unit, limits)]
    if kind == "array":
        return ["a list"]
    if kind == "string":
        return [] if "pattern" in node else ["text"]  # the pattern is that of references
    return {"boolean": ["`true`", "`false`"], "null": ["`null`"], "object": ["a group of settings"]}.get(str(kind), [])


def _range(node: dict[str, Any], unit: str, limits: str) -> str:
    """For example `1 to 65,536 sequences`, or `a number above 0, at most 1`."""
    least, most, above, below = (
        node.get(key) for key in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
    )
    word = "a whole number" if node["type"] == "integer" else "a number"
    after = f" {unit}" if unit else ""
    if limits:
        return f"{limits}{after}"
    if least is not None and most is not None:
        return f"{_number(least, unit)} to {_number(most, unit)}{after}"
    bounds = [
        f"of at least {_number(least, unit)}" if least is not None else "",
        f"above {_number(above, unit)}" if above is not None else "",
        f"at most {_number(most, unit)}" if most is not None else "",
        f"below {_number(below, unit)}" if below is not None else "",
    ]
    return f"{word} {' and '.join(filter(None, bounds))}".strip() + (f" ({unit})" if unit else "")


def _number(value: float, unit: str) -> str:
    if unit == "bytes":
        for size, name in BYTES:
            if value >= size:
                return f"{value / size:g} {name}"
    if value == 2**63 - 1:
        return "2^63 - 1"
    if isinstance(value, int) or value == int(value):
        return f"{int(value):,}"
    return f"{value:g}"


def _written(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{', '.join(map(_written, value))}]"
    return str(value)
