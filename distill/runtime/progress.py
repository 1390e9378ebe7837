"""Messages and progress of a run: one line for how far it is, how fast it goes and how long it will take.

Only rank 0 logs: `configure_logging` silences the others.
"""

import logging
import math
import shutil
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Self, TextIO

from distill.runtime.errors import printable
from distill.runtime.redaction import redact

TERMINAL_EVERY = 0.1  # seconds between two drawings of the line on a terminal
PLAIN_EVERY = 10.0  # seconds between two lines in a log file
WIPE = "\r\x1b[K"

NAMES = ("Matthews", "Pearson", "Spearman")  # first words of titles that keep their capital

_open: list["Progress"] = []  # innermost last: only that one draws, so that nested work does not garble the line
_quiet = False  # in this process
_keepers: list[deque[str]] = []  # of what is logged, see `keeping`


class _Handler(logging.Handler):
    """Sends the messages of this package's loggers through `log`."""

    def emit(self, record: logging.LogRecord) -> None:
        log(self.format(record))


def configure_logging(rank: int) -> None:
    """Show messages and progress of this process if it is rank 0, and neither if it is another one."""
    global _quiet
    _quiet = rank != 0
    package = logging.getLogger("distill")
    if not any(isinstance(handler, _Handler) for handler in package.handlers):
        package.addHandler(_Handler())
    package.setLevel(logging.ERROR if _quiet else logging.INFO)


def log(text: str, stream: TextIO | None = None) -> None:
    """Write plain lines to `stream` (standard error when None) without garbling an active progress line."""
    stream, text = stream or sys.stderr, "\n".join(map(printable, redact(text).split("\n")))
    for keeper in _keepers:
        keeper.extend(text.split("\n"))
    line = _open[-1] if _open and _open[-1].on_terminal else None
    if line and line.stream is stream:
        write_to(stream, WIPE)
    write_to(stream, f"{text}\n")
    if line:
        line.draw()


@contextmanager
def keeping(lines: deque[str]) -> Iterator[None]:
    """Within it `lines` gets every line that `log` writes."""
    _keepers.append(lines)
    try:
        yield
    finally:
        _keepers[:] = [keeper for keeper in _keepers if keeper is not lines]


def under_way() -> list["Progress"]:
    """The pieces of work whose progress is shown now, the innermost last."""
    return list(_open)


def write_to(stream: TextIO, text: str) -> None:
    """Write to a stream that may be gone, such as a terminal of a closed ssh session: the run continues without it."""
    with suppress(OSError, ValueError):  # ValueError: it is closed
        stream.write(text)
        stream.flush()


def duration(seconds: float) -> str:
    """`seconds` as `7 s`, `3:25 min` or `1:03:25 h`."""
    total = round(seconds)
    minutes, rest = divmod(total, 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}:{minutes:02d}:{rest:02d} h"
    return f"{minutes}:{rest:02d} min" if minutes else f"{rest} s"


def counted(count: float, noun: str) -> str:
    """`1 rank`, `1,200 ranks`, `2 micro-batches`."""
    ending = "" if count == 1 else "es" if noun.endswith("ch") else "s"
    return f"{count:,} {noun}{ending}"


def in_a_sentence(title: str) -> str:
    """The title of a measure inside a sentence: `perplexity`, but `F1` and `Matthews correlation`."""
    first, space, rest = title.partition(" ")
    keeps = first in NAMES or any(letter.isupper() or letter.isdigit() for letter in first[1:])
    return title if keeps else f"{first.lower()}{space}{rest}"


def amount(value: float) -> str:
    """`value` as a short count: `0.25`, `950`, `12,345`, `1.23M`, `4.56G`."""
    for size, letter in ((1e9, "G"), (1e6, "M")):
        if abs(value) >= size:
            return f"{value / size:.2f}{letter}"
    if value == int(value) or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


class Progress:
    """Shows done/total, rate, elapsed time and time left of one piece of work.

    `total` and `done` are in `unit`; a `total` of 0 means that the end is unknown. `start` is what an earlier process
    had done: it counts as done, but not towards the rate, and `begin_rate` leaves out what came before it, such as a
    first step that compiles. On a terminal the line is rewritten in place; anywhere else a plain line is written about
    every ten seconds, and one at the end. Nothing is written on ranks other than 0.
    """

    def __init__(
        self,
        label: str,
        total: float,
        unit: str,
        stream: TextIO | None = None,
        start: float = 0,
        limit: float = math.inf,
    ) -> None:
        """`limit`: seconds after which the work ends, done or not."""
        self.label, self.total, self.unit, self.limit = label, total, unit, limit
        self.stream = stream or sys.stderr
        self.start = self.done = start
        self.quiet = _quiet
        self.note = ""
        self.on_terminal = not self.quiet and self.stream.isatty()
        self.began = self.drawn = self.rate_began = time.monotonic()
        if not self.quiet:
            _open.append(self)
            self.draw()

    def update(self, count: float, note: str = "") -> None:
        """`count` so far, `start` included; `note` is at the end of the line. Cheap to call often."""
        self.done, self.note = count, note
        if self.quiet or _open[-1:] != [self]:
            return
        now = time.monotonic()
        if now - self.drawn >= (TERMINAL_EVERY if self.on_terminal else PLAIN_EVERY):
            self.drawn = now
            self.draw() if self.on_terminal else self._write(self.line() + "\n")

    def end_in(self, seconds: float) -> None:
        """From now on the work ends after so many seconds, done or not."""
        self.limit = time.monotonic() - self.began + max(0.0, seconds)

    def begin_rate(self) -> None:
        """From here on count the rate and the time left: what came before was not typical."""
        self.start, self.rate_began = self.done, time.monotonic()

    def close(self) -> None:
        """Write a last line with the amount done and the time. A second call does nothing."""
        if self.quiet or self not in _open:
            return
        _open.remove(self)
        self._write((WIPE if self.on_terminal else "") + self.line(ended=True) + "\n")

    def draw(self) -> None:
        """Rewrite the line in place, on a terminal."""
        if self.on_terminal:
            columns = shutil.get_terminal_size().columns
            self._write(WIPE + self.line()[: columns - 1])

    @property
    def rate(self) -> float:
        """Units a second; 0 before the first."""
        since = time.monotonic() - self.rate_began
        return (self.done - self.start) / since if since > 0 else 0.0

    @property
    def seconds_left(self) -> float | None:
        """Seconds left at this rate, or until the limit; None without a rate or an end."""
        rate, until_limit = self.rate, max(0.0, self.limit - (time.monotonic() - self.began))
        left = max(0.0, self.total - self.done) / rate if rate > 0 and self.total else math.inf
        return min(left, until_limit) if rate > 0 and min(left, until_limit) < math.inf else None

    def line(self, ended: bool = False) -> str:
        elapsed, rate, left = time.monotonic() - self.began, self.rate, self.seconds_left
        of_total = f"/{amount(self.total)}" if self.total else ""
        percent = f" {self.done / self.total:4.0%}" if self.total else ""
        unit = self.unit.removesuffix("s") if self.total == 1 else self.unit
        parts = [f"{self.label}{percent} {amount(self.done)}{of_total} {unit}"]
        if rate > 0:
            parts.append(f"{amount(float(f'{rate:.3g}'))} {self.unit}/s")
        parts.append(f"{duration(elapsed)} elapsed")
        if left is not None and not ended:
            parts.append(f"{duration(left)} left")
        return ", ".join(parts) + (f"  {self.note}" if self.note else "")

    def _write(self, text: str) -> None:
        write_to(self.stream, text)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
