"""Messages and progress of a run: how far it is, how fast it goes and how long it will take; rank 0 alone writes."""

import logging
import math
import shutil
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from threading import RLock
from typing import Any, TextIO

from tqdm import tqdm

from distill.runtime.errors import printable
from distill.runtime.redaction import redact

PLAIN_EVERY = 10.0  # seconds between two lines in a log file
COUNTS = " {n_fmt}/{total_fmt}{unit} [{elapsed}, {rate_noinv_fmt}{left}{postfix}]"
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


def log(text: str) -> None:
    """Write plain lines to standard error without garbling an active progress line."""
    stream, lines = sys.stderr, [printable(line) for line in redact(text).split("\n")]
    for keeper in _keepers:
        keeper.extend(lines)
    with Progress.external_write_mode(stream, nolock=True) if stream.isatty() else nullcontext():
        write_to(stream, "".join(f"{line}\n" for line in lines))


@contextmanager
def keeping(lines: deque[str]) -> Iterator[None]:
    """Within it `lines` gets every line that `log` writes."""
    _keepers.append(lines)
    try:
        yield
    finally:
        _keepers[:] = [keeper for keeper in _keepers if keeper is not lines]


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
    first = title.partition(" ")[0]
    keeps = first in NAMES or any(letter.isupper() or letter.isdigit() for letter in first[1:])
    return title if keeps else title[:1].lower() + title[1:]


class Progress(tqdm):
    """Shows done/total, elapsed time, rate and time left of one piece of work, on rank 0.

    On a terminal this is a bar; anywhere else a plain line is written about every ten seconds, and one at the end.

    Args:
        total: in `unit`; 0: the end is unknown.
        start: what an earlier process had done; it counts as done, but not towards the rate.
        limit: seconds after which the work ends, done or not.
    """

    monitor_interval = 0  # no thread that redraws

    def __init__(self, label: str, total: float, unit: str, start: float = 0, limit: float = math.inf) -> None:
        self.label, self._is_bar = label, sys.stderr.isatty()
        self._rate_from, self._rate_began = start, time.monotonic()
        self._ends = self._rate_began + limit
        super().__init__(
            desc=label,
            total=total or None,
            initial=start,
            unit=f" {unit}",
            unit_scale=isinstance(total, float) or total >= 1e6,
            disable=_quiet,
            leave=self._is_bar,
            bar_format="{l_bar}{bar}|" + COUNTS,
            mininterval=0.1 if self._is_bar else PLAIN_EVERY,
            miniters=0,
            ncols=shutil.get_terminal_size().columns - 1,  # tqdm draws nothing where a terminal gives no size
            nrows=20,
            delay=0.1,
            lock_args=(False,),  # never waited for: a signal may raise while the lock is held
        )
        if not _quiet:
            _open.append(self)

    def update(self, count: float, note: str = "") -> None:
        """`count` so far, `start` included; `note` is at the end of the line. Cheap to call often."""
        self.set_postfix_str(note, refresh=False)
        super().update(count - self.n)

    def end_in(self, seconds: float) -> None:
        """From now on the work ends after so many seconds, done or not."""
        self._ends = time.monotonic() + seconds

    def begin_rate(self) -> None:
        """From here on count the rate and the time left: what came before, such as a compilation, was not typical."""
        self._rate_from, self._rate_began = self.n, time.monotonic()

    @property
    def rate(self) -> float:
        """Units a second; 0 before the first."""
        since = time.monotonic() - self._rate_began
        return (self.n - self._rate_from) / since if since > 0 else 0.0

    @property
    def seconds_left(self) -> float | None:
        """Seconds left at this rate, or until the limit; None without a rate or an end."""
        rate = self.rate
        left = max(0.0, self.total - self.n) / rate if rate > 0 and self.total else math.inf
        left = min(left, max(0.0, self._ends - time.monotonic()))
        return left if rate > 0 and left < math.inf else None

    @property
    def format_dict(self) -> dict[str, Any]:
        """What the line shows, for tqdm."""
        left = None if self.disable else self.seconds_left
        shown = "" if not left else f", {duration(left)} left"
        return super().format_dict | {"rate": self.rate or None, "left": shown}

    def line(self) -> str:
        """All of it as plain text."""
        return str(self.format_meter(**(self.format_dict | {"bar_format": "{l_bar}" + COUNTS, "ncols": None})))

    def display(self, msg: str | None = None, pos: int | None = None) -> bool:
        """Draw the bar, or write a line; called by tqdm."""
        if self._is_bar:
            return bool(super().display(msg, pos))
        if msg is None:
            write_to(sys.stderr, f"{self.line()}\n")
        return False

    def close(self) -> None:
        """Leave a last line with the amount done and the time. A second call does nothing."""
        if self.disable:
            return
        _open[:] = [work for work in _open if work is not self]
        if not self._is_bar:
            self.display()
        with suppress(OSError, ValueError):  # of a terminal that is gone
            super().close()


Progress.set_lock(RLock())  # of threads alone


def under_way() -> list[Progress]:
    """The pieces of work whose progress is shown now, the innermost last."""
    return list(_open)
