"""Numbers that a run gives step by step, kept in bounded memory for curves."""

import json
import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from distill.report.lookup import usable

MOST = 500  # points of a curve; no screen shows more


class Series:
    """Lines of numbers by name, in their order; neighbours become their mean, so that fewer than `MOST` are kept.

    One thread may add to it while another one reads.
    """

    def __init__(self) -> None:
        self.merged = 1  # lines that a point stands for
        self._points: list[dict[str, float]] = []
        self._pending: list[dict[str, Any]] = []
        self._lock = threading.Lock()

    def add(self, line: dict[str, Any]) -> None:
        with self._lock:
            self._pending.append(line)
            if len(self._pending) < self.merged:
                return
            self._points.append(_mean(self._pending))
            self._pending = []
            if len(self._points) >= MOST:
                self._points = list(_halved(self._points))
                self.merged *= 2

    def points(self) -> list[dict[str, float]]:
        """The means so far, the last of fewer lines where that comes so."""
        with self._lock:
            return self._points + ([_mean(self._pending)] if self._pending else [])


def thinned(points: Sequence[dict[str, float]]) -> list[dict[str, float]]:
    """At most `MOST` points, by means of neighbours."""
    kept = list(points)
    while len(kept) > MOST:
        kept = list(_halved(kept))
    return kept


def earlier_lines(path: Path, step: int) -> list[dict[str, Any]]:
    """Lines of a log up to a step, which an earlier start of a run has left: about `MOST`, evenly spread, at most."""
    if step <= 0 or not path.is_file():
        return []
    content = path.read_bytes().splitlines()
    return list(_up_to(content[:: max(1, len(content) // MOST)], step))


def read_json(source: Path | bytes) -> dict[str, Any]:
    """A JSON object, of a file or as it is; empty where there is none, whatever the reason."""
    try:
        value = json.loads(source if isinstance(source, bytes) else source.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def curve(points: Iterable[dict[str, float]], x: str, y: str) -> tuple[list[float], list[float]]:
    """The values of two names where there are both."""
    pairs = [(point[x], point[y]) for point in points if x in point and y in point]
    return [a for a, _ in pairs], [b for _, b in pairs]


def _up_to(content: Iterable[bytes], step: int) -> Iterator[dict[str, Any]]:
    for text in content:
        line = read_json(text)  # empty for a torn last line, and for damage, which is the run folder's to report
        if usable(line.get("step")) and line["step"] <= step:
            yield line


def _halved(points: list[dict[str, float]]) -> Iterator[dict[str, float]]:
    return (_mean(points[at : at + 2]) for at in range(0, len(points), 2))


def _mean(lines: list[dict[str, Any]]) -> dict[str, float]:
    """Of each name the mean of the values that are finite numbers; names without any are left out."""
    names = dict.fromkeys(name for line in lines for name in line)
    values = {name: [line[name] for line in lines if usable(line.get(name))] for name in names}
    return {name: sum(of) / len(of) for name, of in values.items() if of}
