"""Logs of one JSON object a line that survive a kill, and JSON without NaN and infinities."""

import json
import math
import os
from pathlib import Path
from typing import Any

from distill.errors import SettingError
from distill.files import atomic


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a log, oldest first; a torn last line, left by a killed process, is passed over.

    A missing file has no lines. Raises SettingError where any other line is not a JSON object.
    """
    if not path.exists():
        return []
    *whole, _torn = path.read_bytes().split(b"\n")
    lines = []
    for number, line in enumerate(whole, start=1):
        try:
            value = json.loads(line)
        except ValueError:
            value = None
        if not isinstance(value, dict):
            raise SettingError(f"{path}: line {number} is not a JSON object; mend or remove that line")
        lines.append(value)
    return lines


class JsonLines:
    """A log that is flushed line by line, so that a killed run loses at most the line it was writing.

    Opening it removes a torn last line. Numbers that JSON cannot hold (NaN, infinities) are written as null.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            content = path.read_bytes()
            os.truncate(path, content.rfind(b"\n") + 1)
        self.file = path.open("a", encoding="utf-8")

    def append(self, line: dict[str, Any]) -> None:
        self.file.write(json.dumps(without_nan(line), allow_nan=False) + "\n")
        self.file.flush()

    def drop_after(self, step: int) -> None:
        """Remove the lines of later steps than `step`: the resumed run writes them again."""
        kept = [line for line in read_lines(self.path) if line.get("step", 0) <= step]
        self.file.close()
        with atomic(self.path) as new:
            new.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
        self.file = self.path.open("a", encoding="utf-8")

    def close(self) -> None:
        self.file.close()


def without_nan(value: Any) -> Any:
    """`value` as JSON can hold it: NaN and infinities, also inside dicts and lists, become None."""
    if isinstance(value, dict):
        return {name: without_nan(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
