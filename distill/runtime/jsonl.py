"""Logs of one JSON object a line that survive a kill, and JSON without NaN and infinities."""

import io
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from distill.runtime.errors import Damaged
from distill.runtime.files import atomic

LogLine = dict[str, Any]  # of a log of JSON lines: what it holds, by name


def is_metrics(line: Any) -> bool:
    """Whether this can be a line of metrics.jsonl: numbers, among them those that every step has."""
    return _fits(line, ("step", "seconds", "data_wait"), _is_score)


def is_history(line: Any) -> bool:
    """Whether this can be a line of history.jsonl: where it was measured, the losses, and scores by measure and set."""
    return _fits(line, ("epoch", "step", "tokens", "seconds"), _is_group) and "loss" in line


def is_curve(line: Any) -> bool:
    """Whether this can be a line of curve.jsonl: where it was measured, and the score."""
    return _fits(line, ("step", "tokens", "seconds"), _is_score) and "score" in line


def _fits(line: Any, place: tuple[str, ...], other: Callable[[Any], bool]) -> bool:
    return (
        isinstance(line, dict)
        and all(_is_number(line.get(name)) and line[name] >= 0 for name in place)
        and all(other(value) for name, value in line.items() if name not in place)
    )


def _is_group(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_is_score, value.values()))


def _is_score(value: Any) -> bool:
    return value is None or _is_number(value)


def _is_number(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) < 2**63 if isinstance(value, int) else math.isfinite(value)


def read_lines(
    path: Path, fits: Callable[[Any], bool] = lambda line: isinstance(line, dict), only_good: bool = False
) -> list[LogLine]:
    """The objects of a log, oldest first; a torn last line of a killed process is skipped.

    A missing file has no lines.

    Args:
        fits: whether a value can be a line of this log; None: any object.
        only_good: skip damaged lines.

    Raises:
        Damaged: any other line does not fit, or its step does not come after that of the line before.
    """
    if not path.exists():
        return []
    if not path.is_file():  # a pipe would keep its reader waiting
        if only_good:
            return []
        raise Damaged(path, "it is no file")
    *whole_lines, _torn = path.read_bytes().split(b"\n")
    lines: list[LogLine] = []
    for number, text in enumerate(whole_lines, start=1):
        line = _parse(text)
        good = isinstance(line, dict) and (fits is None or fits(line))
        if good and (not lines or line.get("step", 0) > lines[-1].get("step", -1)):
            lines.append(line)
        elif not only_good:
            raise Damaged(path, f"line {number} is not a JSON object of this log")
    return lines


def _parse(text: bytes) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


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
        self.file = _open(path)

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

    def drop_after(self, step: int) -> None:
        """Remove the lines of later steps than `step`: the resumed run writes them again."""
        remaining = [line for line in read_lines(self.path) if line.get("step", 0) <= step]
        self.file.close()
        with atomic(self.path) as new:
            new.write_text("".join(json.dumps(line) + "\n" for line in remaining), encoding="utf-8")
        self.file = _open(self.path)

    def close(self) -> None:
        self.file.close()


def _open(path: Path) -> io.FileIO:
    """The file to append to, without a buffer, which would keep a line that failed and write it later."""
    return path.open("ab", buffering=0)


def without_nan(value: Any) -> Any:
    """`value` as JSON can hold it: NaN and infinities, also inside dicts and lists, become None."""
    if isinstance(value, dict):
        return {name: without_nan(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
