"""Settings by their dotted names."""

from typing import Any


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings by their dotted names; lists stay lists."""
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, dict) and value:
            flat |= flatten(value, f"{prefix}{name}.")
        else:
            flat[prefix + str(name)] = list(value) if isinstance(value, tuple) else value
    return flat
