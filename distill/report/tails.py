"""The last lines of every rank's log, fit to be shown: without secrets, colours and control characters."""

import os
import re
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

from distill.runtime.errors import printable
from distill.runtime.redaction import redact

LINES = 30  # of each log
BYTES = 16_384  # of each log that are read
LONGEST = 2000  # characters of a line that is shown
MOST_RANKS = 32  # those whose logs were written to last, where there are more
NAME = re.compile(r"rank(\d+)\.log")
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")  # of terminals: colours, and how a progress line is drawn anew


def tails(folder: Path) -> tuple[dict[int, list[str]], int]:
    """The last lines by rank of the logs in a run's folder `logs`, and how many logs there are in all."""
    logs = [(int(match[1]), path) for path in folder.glob("*.log") if (match := NAME.fullmatch(path.name))]
    newest = sorted(logs, key=lambda log: _changed(log[1]), reverse=True)[:MOST_RANKS]
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
    kept = [line for each in lines if (line := ESCAPES.sub("", each.rstrip("\r").rpartition("\r")[2]).rstrip())]
    return [_shown(line) for line in kept[-LINES:]]


@lru_cache(maxsize=4096)  # most lines stand in the next page again, and looking for secrets takes its time
def _shown(line: str) -> str:
    if len(line) > LONGEST:  # not cut, because a part of a secret would not be known as one
        return f"(a line of {len(line):,} characters)"
    return printable(redact(line))


def _changed(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
