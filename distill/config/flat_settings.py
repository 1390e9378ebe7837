"""Settings by their dotted names."""

from typing import Any


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings by their dotted names; lists stay lists."""
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        name = str(name)  # of a file of somebody else's it may be a number
        if isinstance(value, dict) and value:
            flat |= flatten(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = list(value) if isinstance(value, tuple) else value
    return flat
