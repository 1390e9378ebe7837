"""Settings that refer to settings, `${optimizer.lr}`: read only where they stand for as little as any run needs.

A few lines such as `b: ${a}${a}`, `c: ${b}${b}` stand for more characters than any memory holds.
"""

import re
from typing import Any

from distill.runtime.errors import SettingError

MAX_LENGTH = 1_000_000  # characters and values that one setting may stand for; those of a run have a few thousand
REFERENCE = re.compile(
    r"\$\{\s*(\.*)([^${}:.\s][^${}:\s]*)\s*\}"
)  # to another setting, from this one's group or the top


def refuse_exploding(settings: Any) -> None:
    """Raises SettingError for a setting whose references, one after the other, stand for more than `MAX_LENGTH`.

    Args:
        settings: OmegaConf's, in which nothing was resolved yet.
    """
    from omegaconf import OmegaConf

    values: Any = OmegaConf.to_container(settings, resolve=False)
    lengths: dict[str, int] = {}
    for name in values:
        _length(values, str(name), lengths)


def _length(tree: Any, name: str, lengths: dict[str, int]) -> int:
    """Of the value with this dotted name: its characters and values, and those that it refers to.

    Args:
        lengths: of the names that were met; 0 of those that this one is in, which OmegaConf refuses.
    """
    if name in lengths:
        return lengths[name]
    lengths[name] = 0
    value = _value(tree, name)
    if isinstance(value, dict | list):
        inner = value if isinstance(value, dict) else range(len(value))
        total = 1 + sum(_length(tree, f"{name}.{key}", lengths) for key in inner)
    else:
        text = value if isinstance(value, str) else ""
        total = 1 + len(text) + sum(_length(tree, target, lengths) for target in _targets(name, text))
    if total > MAX_LENGTH:
        raise SettingError(
            f"refers to settings that refer to others, and stands for more than {MAX_LENGTH:,} characters",
            setting=name,
            cure="no setting is that long, so correct it",
        )
    lengths[name] = total
    return total


def _targets(name: str, text: str) -> list[str]:
    """The dotted names that a text refers to."""
    parts = name.split(".")
    return [".".join([*parts[: -len(dots)], path] if dots else [path]) for dots, path in REFERENCE.findall(text)]


def _value(tree: Any, name: str) -> Any:
    """What has this dotted name; None where nothing has."""
    for part in name.replace("[", ".").replace("]", "").split("."):
        if isinstance(tree, list) and part.isdigit() and int(part) < len(tree):
            tree = tree[int(part)]
        elif isinstance(tree, dict):
            tree = tree.get(part)
        else:
            return None
    return tree
