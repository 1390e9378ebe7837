"""Logs of one JSON object a line that survive a kill, and JSON without NaN and infinities."""

import json
import math
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from distill.runtime.errors import Damaged

LogLine = dict[str, Any]  # of a log of JSON lines: what it holds, by name


def read_lines(path: Path, only_good: bool = False, check: Callable[[LogLine], object] | None = None) -> list[LogLine]:
    """The objects of a log, oldest first, without a torn last line of a killed process; none of a missing file.

    Args:
        check: raises ValueError for a line that holds something else than the log does.

    Raises:
        Damaged: a line is no JSON object whose `step` comes after that of the line before, unless `only_good`.
    """
    if not path.is_file():  # a pipe would keep its reader waiting
        if path.exists() and not only_good:
            raise Damaged(path, "it is no file")
        return []
    *whole_lines, _torn = path.read_bytes().split(b"\n")
    lines: list[LogLine] = []
    for number, text in enumerate(whole_lines, start=1):
        line: Any = None
        with suppress(ValueError, RecursionError):
            read = json.loads(text)
            if check is not None and isinstance(read, dict):
                check(read)
            line = read
        step = line.get("step") if isinstance(line, dict) else None
        if isinstance(step, int) and (not lines or step > lines[-1]["step"]):
            lines.append(line)
        elif not only_good:
            raise Damaged(path, f"line {number} is not a JSON object of this log")
    return lines


class JsonLines:
    """A log that is flushed line by line, so that a killed run loses at most the line it was writing.

    Opening it removes a torn last line. Numbers that JSON cannot hold (NaN, infinities) are written as null.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            os.truncate(path, path.read_bytes().rfind(b"\n") + 1)
        self.file = path.open("ab", buffering=0)  # a buffer would keep a line that failed and write it later

    def append(self, line: LogLine) -> None:
        """Write a line, whole or not at all. Raises OSError where there is no room."""
        content = (json.dumps(without_nan(line), allow_nan=False) + "\n").encode()
        before = self.file.tell()
        try:
            written = self.file.write(content)
            if written < len(content):  # as much as there was room for; writing the rest raises the error
                self.file.write(content[written:])
        except OSError:
            self.file.truncate(before)
            raise

    def close(self) -> None:
        self.file.close()


def without_nan(value: Any) -> Any:
    """`value` as JSON can hold it: NaN and infinities, also inside dicts and lists, become None."""
    if isinstance(value, dict):
        return {name: without_nan(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
