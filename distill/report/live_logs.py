"""A run under way in bounded memory: numbers for curves, and the last lines of every rank's log."""

import json
import os
import re
import threading
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from distill.report.words import is_number
from distill.runtime.errors import printable
from distill.runtime.jsonl import LogLine
from distill.runtime.redaction import redact

MAX_POINTS = 500  # points of a curve; no screen shows more
LINES = 30  # of each log
BYTES = 16_384  # of each log that are read
LONGEST = 2000  # characters of a line that is shown
MAX_RANKS = 32  # those whose logs were written to last, where there are more
NAME = re.compile(r"rank(\d+)\.log")
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")  # of terminals: colours, and how a progress line is drawn anew


class Series:
    """Lines of numbers by name, in their order; neighbours become their mean, so that fewer than `MAX_POINTS` are kept.

    One thread may add to it while another one reads.
    """

    def __init__(self) -> None:
        self.merged = 1  # lines that a point stands for
        self._points: list[dict[str, float]] = []
        self._pending: list[LogLine] = []
        self._lock = threading.Lock()

    def add(self, line: LogLine) -> None:
        with self._lock:
            self._pending.append(line)
            if len(self._pending) < self.merged:
                return
            self._points.append(_mean(self._pending))
            self._pending = []
            if len(self._points) >= MAX_POINTS:
                self._points = list(_halved(self._points))
                self.merged *= 2

    def points(self) -> list[dict[str, float]]:
        """The means so far, the last of fewer lines where that comes so."""
        with self._lock:
            return self._points + ([_mean(self._pending)] if self._pending else [])


def thinned(points: Sequence[dict[str, float]]) -> list[dict[str, float]]:
    """At most `MAX_POINTS` points, by means of neighbours."""
    remaining = list(points)
    while len(remaining) > MAX_POINTS:
        remaining = list(_halved(remaining))
    return remaining


def earlier_lines(path: Path, step: int) -> list[LogLine]:
    """Lines of a log up to a step, that earlier starts of a run wrote: about `MAX_POINTS`, evenly spread, at most."""
    if step <= 0 or not path.is_file():
        return []
    content = path.read_bytes().splitlines()
    return list(_up_to(content[:: max(1, len(content) // MAX_POINTS)], step))


def read_json(source: Path | bytes) -> dict[str, Any]:
    """A JSON object, of a file or as it is; empty where there is none, whatever the reason."""
    try:
        value = json.loads(source if isinstance(source, bytes) else source.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _up_to(content: Iterable[bytes], step: int) -> Iterator[LogLine]:
    for text in content:
        line = read_json(text)  # empty for a torn last line, and for damage, which is the run folder's to report
        if is_number(line.get("step")) and line["step"] <= step:
            yield line


def _halved(points: list[dict[str, float]]) -> Iterator[dict[str, float]]:
    return (_mean(points[at : at + 2]) for at in range(0, len(points), 2))


def _mean(lines: list[LogLine]) -> dict[str, float]:
    """The mean of the finite values of each name; names without any are left out."""
    names = dict.fromkeys(name for line in lines for name in line)
    values = {name: [line[name] for line in lines if is_number(line.get(name))] for name in names}
    return {name: sum(numbers) / len(numbers) for name, numbers in values.items() if numbers}


def tails(folder: Path) -> tuple[dict[int, list[str]], int]:
    """The last lines by rank of the logs in a run's folder `logs`, and how many logs there are in all."""
    logs = [(int(match[1]), path) for path in folder.glob("*.log") if (match := NAME.fullmatch(path.name))]
    newest = sorted(logs, key=lambda log: _changed(log[1]), reverse=True)[:MAX_RANKS]
    return {rank: last_lines(path) for rank, path in sorted(newest)}, len(logs)


def last_lines(path: Path) -> list[str]:
    """The last lines of a log; none where it cannot be read."""
    try:
        with path.open("rb") as log:
            size = log.seek(0, os.SEEK_END)
            log.seek(max(0, size - BYTES))
            text = log.read().decode("utf-8", errors="replace")
    except OSError:
        return []
    lines = text.split("\n")
    return cleaned(lines[1:] if size > BYTES else lines)  # the first one may have lost its beginning


def cleaned(lines: Iterable[str]) -> list[str]:
    """The last ones of these lines that are not empty, fit to be shown; of one that was drawn anew its last state."""
    shown = [line for text in lines if (line := ESCAPES.sub("", text.rstrip("\r").rpartition("\r")[2]).rstrip())]
    return [_shown(line) for line in shown[-LINES:]]


@lru_cache(maxsize=4096)  # the next page shows the same lines again, and the search for secrets is slow
def _shown(line: str) -> str:
    if len(line) > LONGEST:  # not cut, because half a secret would not be recognised
        return f"(a line of {len(line):,} characters)"
    return printable(redact(line))


def _changed(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
