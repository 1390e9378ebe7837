"""YAML that this program did not write itself: read only where it is as small as it looks.

An alias stands for a node that is elsewhere in the file, so a few lines of aliases of aliases stand for more nodes than
any memory holds. They take none while YAML is parsed; whoever walks or copies what was parsed takes all of it.
"""

from pathlib import Path
from typing import Any

import yaml

from distill.runtime.errors import first_line

MAX_BYTES = 4 << 20  # of a file: PyYAML takes seconds for one
MAX_NODES = 20_000  # with those that aliases stand for; the settings of a run have a few hundred


class TooLargeYaml(ValueError):
    """A file of YAML stands for more than it may; the message is the reason."""


def read_yaml(path: Path) -> Any:
    """What a file holds.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no YAML, or `TooLargeYaml`.
    """
    try:
        return yaml.safe_load(bounded_text(path))
    except yaml.YAMLError as error:
        raise ValueError(first_line(error)) from None
    except RecursionError:
        raise TooLargeYaml("it has lists in lists too deep to be read") from None


def bounded_text(path: Path) -> str:
    """The text of a file, for what reads YAML by itself.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no text, or `TooLargeYaml`; what else is wrong with it is left to the reader.
    """
    if path.stat().st_size > MAX_BYTES:
        raise TooLargeYaml(f"it has more than {MAX_BYTES >> 20} MB")
    text = path.read_text(encoding="utf-8")
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader) if "*" in text and "&" in text else None
        if node is not None and _num_nodes(node, {}) > MAX_NODES:
            raise TooLargeYaml(f"its aliases stand for more than {MAX_NODES:,} values")
    except yaml.YAMLError:
        pass
    except RecursionError:
        raise TooLargeYaml("it has lists in lists too deep to be read") from None
    return text


def _num_nodes(node: Any, counted: dict[int, int]) -> int:
    """How many nodes this one is once every alias in it is replaced by what it stands for.

    Args:
        counted: the same of the nodes that were met, by their ids; 0 of those that this one is in.
    """
    if (count := counted.get(id(node))) is not None:
        if not count:
            raise TooLargeYaml("an alias in it stands for what the alias is in")
        return count
    counted[id(node)] = 0
    parts = node.value if isinstance(node, yaml.CollectionNode) else []
    inner = [part for pair in parts for part in pair] if isinstance(node, yaml.MappingNode) else parts
    counted[id(node)] = 1 + sum(_num_nodes(part, counted) for part in inner)
    return counted[id(node)]


def read_settings(file: Path) -> dict[str, Any]:
    """The settings in config.yaml of a run; none where the file is missing, cannot be read, or holds no mapping."""
    try:
        content = read_yaml(file) if file.is_file() else None  # a pipe would be waited for
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
