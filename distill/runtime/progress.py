"""Messages and progress of a run: how far it is, how fast it goes and how long it will take.

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
from threading import RLock
from typing import Self, TextIO

from tqdm import tqdm

from distill.runtime.errors import printable
from distill.runtime.redaction import redact

PLAIN_EVERY = 10.0  # seconds between two lines in a log file

NAMES = ("Matthews", "Pearson", "Spearman")  # first words of titles that keep their capital

_open: list["Progress"] = []  # innermost last
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
    stream, lines = stream or sys.stderr, [printable(line) for line in redact(text).split("\n")]
    for keeper in _keepers:
        keeper.extend(lines)
    drawn = list(_open) if stream.isatty() else []
    for work in drawn:
        work.draw(hidden=True)
    write_to(stream, "".join(f"{line}\n" for line in lines))
    for work in drawn:
        work.draw()


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
    minutes, rest = divmod(round(seconds), 60)
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


def _amount(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.3g}"


class _Bar(tqdm):
    monitor_interval = 0  # no thread that redraws


_Bar.set_lock(RLock())


class Progress:
    """Shows done/total, rate, elapsed time and time left of one piece of work.

    On a terminal this is a bar of tqdm; anywhere else a plain line is written about every ten seconds, and one at the
    end. Nothing is written on ranks other than 0.

    Args:
        total: in `unit`; 0: the end is unknown.
        start: what an earlier process had done; it counts as done, but not towards the rate.
        limit: seconds after which the work ends, done or not.
    """

    def __init__(self, label: str, total: float, unit: str, start: float = 0, limit: float = math.inf) -> None:
        self.label, self.total, self.unit, self.limit, self.note = label, total, unit, limit, ""
        self.done = self._rate_from = start
        self._began = self._rate_began = self._written = time.monotonic()
        self._on_terminal = sys.stderr.isatty()
        self._bar = _Bar(
            desc=label,
            total=total or None,
            initial=start,
            unit=f" {unit}",
            unit_scale=isinstance(total, float) or total >= 1e6,
            disable=_quiet or not self._on_terminal,
            bar_format="{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}, {rate_noinv_fmt}{postfix}]",
            ncols=shutil.get_terminal_size().columns - 1,  # tqdm draws nothing where a terminal gives no size
            nrows=20,
            miniters=0,
            delay=0.1,
            lock_args=(False,),  # never waited for: a signal may raise while the lock is held
        )
        if not _quiet:
            _open.append(self)

    def update(self, count: float, note: str = "") -> None:
        """`count` so far, `start` included; `note` is at the end of the line. Cheap to call often."""
        self.done, self.note = count, note
        if self not in _open:
            return
        if self._on_terminal:
            self._bar.set_postfix_str(", ".join([*self._left(), *filter(None, [note])]), refresh=False)
            with suppress(OSError, ValueError):  # of a terminal that is gone
                self._bar.update(count - self._bar.n)
        elif time.monotonic() - self._written >= PLAIN_EVERY:
            self._written = time.monotonic()
            write_to(sys.stderr, f"{self.line()}\n")

    def end_in(self, seconds: float) -> None:
        """From now on the work ends after so many seconds, done or not."""
        self.limit = time.monotonic() - self._began + max(0.0, seconds)

    def begin_rate(self) -> None:
        """From here on count the rate and the time left: what came before, such as a compilation, was not typical."""
        self._rate_from, self._rate_began = self.done, time.monotonic()

    def close(self) -> None:
        """Leave a last line with the amount done and the time. A second call does nothing."""
        if self not in _open:
            return
        _open.remove(self)
        if not self._on_terminal:
            write_to(sys.stderr, f"{self.line(ended=True)}\n")
        with suppress(OSError, ValueError):
            self._bar.close()

    def draw(self, hidden: bool = False) -> None:
        """Draw the bar on the terminal, or take it off."""
        with suppress(OSError, ValueError):
            self._bar.clear(nolock=True) if hidden else self._bar.refresh(nolock=True)

    @property
    def rate(self) -> float:
        """Units a second; 0 before the first."""
        since = time.monotonic() - self._rate_began
        return (self.done - self._rate_from) / since if since > 0 else 0.0

    @property
    def seconds_left(self) -> float | None:
        """Seconds left at this rate, or until the limit; None without a rate or an end."""
        rate, until_limit = self.rate, max(0.0, self.limit - (time.monotonic() - self._began))
        left = max(0.0, self.total - self.done) / rate if rate > 0 and self.total else math.inf
        return min(left, until_limit) if rate > 0 and min(left, until_limit) < math.inf else None

    def line(self, ended: bool = False) -> str:
        """All of it as plain text."""
        done, rate = f"{_amount(self.done)} {self.unit}", self.rate
        if self.total:
            done = f"{self.done / self.total:4.0%} {_amount(self.done)}/{_amount(self.total)} {self.unit}"
        speed = [f"{_amount(float(f'{rate:.3g}'))} {self.unit}/s"] if rate > 0 else []
        elapsed = f"{duration(time.monotonic() - self._began)} elapsed"
        parts = [f"{self.label} {done}", *speed, elapsed, *([] if ended else self._left()), self.note]
        return ", ".join(filter(None, parts))

    def _left(self) -> list[str]:
        left = self.seconds_left
        return [] if left is None else [f"{duration(left)} left"]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
