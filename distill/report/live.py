"""Keeps report.html of a run under way: the report's own sections below the state of the run, renewed by a thread.

The thread neither delays the run nor ends it.
"""

import json
import logging
import os
import re
import shlex
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from enum import IntEnum
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from distill.distributed import Ranks
from distill.report import figures, page, report
from distill.report.page import Block, Code, Renewal, Section, Tiles
from distill.report.summary import reproduced_by
from distill.report.words import NONE, is_number, number, percent, time_of
from distill.runs.profile.sampler import Sampler
from distill.runs.record import Record
from distill.runtime.errors import SettingError, first_line, printable
from distill.runtime.host import memory_failure, storage_failure
from distill.runtime.jsonl import LogLine, read_lines
from distill.runtime.progress import keeping, under_way
from distill.runtime.redaction import redact

PAGE = "report.html"
RESTING = 60.0  # seconds between two looks at a page whose run has stopped: the same command may bring it back
PATIENCE = 30.0  # seconds that the end of a run waits for a page that is being written
SIGN = 'id="overdue"'  # is in a page that renews itself, and in no report
MAX_POINTS = 500  # lines of metrics that are drawn; no screen shows more
LINES, BYTES, LONGEST = 30, 16_384, 2000  # of each log: lines shown, bytes read, characters of a line
MAX_RANKS = 32  # those whose logs were written to last, where there are more
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")  # of terminals: colours, and how a progress line is drawn anew
AGAIN = "The same command, in the same folder, resumes from the newest checkpoint."
# What the same command does when it is given again, by exit status; every other status: the text in `_stopped`.
AFTER = {
    1: f"This is a bug, of Distill or of code that a setting names. {AGAIN}",
    2: "Nothing is lost. Correct what the message names and give the same command: it resumes.",
    3: "Nothing was published. The same command resumes from the newest good checkpoint.",
    74: f"No finished file is lost. Make room or repair the storage. {AGAIN}",
}

logger = logging.getLogger(__name__)


@dataclass
class Ending:
    """How a run has stopped: its exit status, the line that it ended with, and of a bug the traceback."""

    status: int
    message: str
    traceback: str = ""


@dataclass
class Status:
    """A run at one moment.

    Attributes:
        every: seconds until the next page.
        record: the facts on the run and its history, so far.
        metrics: lines of metrics.jsonl, evenly spaced, the newest last.
        steps: after which the run ends; None: the clock ends it.
        left: estimated seconds until it ends; None: no estimate yet.
        fraction: how much of the run is done, from 0 to 1; None before its first step.
        exchange_wait: fraction of the time in exchanges between ranks; None of one rank.
        activities: the progress of what is being done now, the innermost last.
        samples: of the host of rank 0, by name (`distill.runs.profile.sampler`).
        logs: the last lines of each rank's log; of a run of one process its own log.
        num_logs: ranks that have one.
    """

    folder: Path
    every: float
    record: Record
    metrics: list[LogLine] = field(default_factory=list)
    steps: int | None = None
    left: float | None = None
    fraction: float | None = None
    exchange_wait: float | None = None
    activities: list[str] = field(default_factory=list)
    samples: dict[str, list[float]] = field(default_factory=dict)
    logs: dict[int, list[str]] = field(default_factory=dict)
    num_logs: int = 1
    ending: Ending | None = None


def title_of(run: Status) -> str:
    """The title of the page, which a tab of a browser shows the beginning of."""
    name = run.folder.name  # by which its user knows it; a recipe may be changed beyond itself
    if run.ending is not None:
        return f"{name}: finished, without a report" if run.ending.status == 0 else f"{name}: stopped"
    return f"{name}: under way" if run.fraction is None else f"{percent(run.fraction)} of {name}"


def sections(run: Status) -> list[Section]:
    """The state of the run, the report so far, and the last lines of the logs."""
    pictures = figures.draw(run.record, run.metrics, None, run.samples)
    opening, *others = report.sections(run.record, pictures)
    state = _stopped(run, run.ending) if run.ending else _under_way(run)
    title = "The last lines of every rank" if run.num_logs > 1 else "The last lines of its log"
    parts = [Section("", [*state, *opening.blocks]), *others, Section(title, _logs(run))]
    return [part for part in parts if part.blocks]


def _under_way(run: Status) -> list[Block]:
    idle = "between two phases" if run.record.corpus.name else "preparing models and text"
    now = "; ".join(run.activities) or idle
    renewed = f"Written {clock()}; reloads every {time_of(run.every)}, and becomes the report when the run ends."
    return [f"Under way: {now}.", *_tiles(run), f"{renewed} Folder: {run.folder}."]


def _stopped(run: Status, ending: Ending) -> list[Block]:
    if ending.status == 0:
        command = shlex.join(["distill", "report", f"run={os.path.abspath(run.folder)}"])
        return ["The run is finished, but its report could not be written. This command writes it:", Code(command)]
    after = AFTER.get(ending.status, f"What is done so far is kept. {AGAIN}")
    stopped: list[Block] = [f"Stopped with status {ending.status}: {ending.message}", after]
    stopped += [*reproduced_by(run.record.command_from_anywhere), f"Folder: {run.folder}. Written {clock()}."]
    return stopped + ([Code(ending.traceback, "Traceback")] if ending.traceback else []) + _tiles(run)


def _tiles(run: Status) -> list[Block]:
    latest = run.metrics[-1] if run.metrics else {}
    step, of_all = latest.get("step"), f" of {number(run.steps)}" if run.steps else ""
    candidates = [
        (percent(run.fraction), f"step {number(step or 0)}{of_all}"),
        (number(step), "steps" if run.fraction is None else ""),
        (time_of(run.left) or NONE, "left, at this rate" if run.ending is None else ""),
        (number(latest.get("loss/total")), "loss of the newest steps"),
        (number(latest.get("tokens_per_second")), "tokens a second"),
        (percent(latest.get("data_wait"), 1), "of the time waiting for data"),
        (percent(run.exchange_wait, 1), "of the time in exchanges between ranks"),
        (number(latest.get("skipped") or None), "steps skipped, not finite"),
    ]
    shown = [(value, text) for value, text in candidates if value != NONE and text]
    return [Tiles(shown)] if shown else []


def _logs(run: Status) -> list[Block]:
    shown = {rank: "\n".join(lines) or "nothing yet" for rank, lines in run.logs.items()}
    if run.num_logs <= 1:
        return [Code(text, wrap=True) for text in shown.values()]
    note = f"Rank 0 first; the others unfold. The logs themselves lie in {run.folder}/logs."
    if run.num_logs > len(shown):
        note += f" The {len(shown)} of {run.num_logs} ranks that wrote last are shown."
    return [note, *(Code(text, f"rank {rank}" if rank else "", wrap=True) for rank, text in sorted(shown.items()))]


class Renewer:
    """Draws a page every so many seconds in a thread; only the first failure is logged, and none is raised."""

    def __init__(self, path: Path, every: float, draw: Callable[[], None]) -> None:
        self.path, self.every, self._draw, self._failed = path, every, draw, False
        self.stopped = threading.Event()
        self._thread = threading.Thread(target=self._work, name="report", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, patience: float = PATIENCE) -> bool:
        """Draw no more; whether the thread has ended: it may hang in storage, where a second writer would hang, too."""
        self.stopped.set()
        if self._thread.is_alive():
            self._thread.join(patience)
        return not self._thread.is_alive()

    def draw(self) -> None:
        try:
            self._draw()
        except Exception as error:
            if not self._failed:
                reason = storage_failure(error) or f"{type(error).__name__}: {first_line(error)}"
                logger.warning(f"cannot write {self.path} ({reason}); the run continues without it")
            self._failed = True

    def _work(self) -> None:
        while not self.stopped.wait(self.every):
            self.draw()

    def write(self, title: str, parts: list[Section], rests: bool = False) -> None:
        """Write the page in one step, unless it has taken so long that the report may be there.

        Args:
            rests: whether what it shows has stopped, so that it renews itself seldom and expects no news.

        Raises:
            OSError: storage that fails; what stood there before stays.
        """
        renewal = Renewal(max(RESTING, self.every) if rests else self.every, watched=not rests)
        new = self.path.with_name(f".{self.path.name}.live")  # not that of `atomic`, which the report may use meanwhile
        new.write_text(page.html(title, parts, renewal), encoding="utf-8")
        if rests or not self.stopped.is_set():
            new.replace(self.path)
        else:
            new.unlink()


class Phase(IntEnum):
    """How far a run is, as its page sees it."""

    preparing = 0  # the run in the folder may be finished
    begun = 1  # it is not
    described = 2  # it is the run's
    published = 3  # the report is there, which no page of a run that ends badly replaces


class RunPage:
    """The page of a run from its first minute on; a context manager that writes the error where the run fails.

    Rank 0 alone writes, every `report.every` seconds, into a folder in which no other process is at work. Nothing is
    written over a finished run before `begin`. A run that is refused before `describe` leaves what was there.
    """

    def __init__(
        self, path: Path, recipe: str, command: str, every: float | None, minutes: float | None, ranks: Ranks
    ) -> None:
        """
        Args:
            every: seconds between two pages; None or 0: there is none.
            minutes: after which the clock ends the training, if it does.
        """
        self.path, self.minutes, self.ranks = path, minutes, ranks
        self.on = ranks.rank == 0 and bool(every)
        self._renewer = Renewer(path / PAGE, every or RESTING, self._draw)
        self._record = Record(recipe=recipe, command=command, started_in=os.getcwd())
        self._phase, self._began = Phase.preparing, 0.0
        self._steps: int | None = None
        self._ending: Ending | None = None
        self._logged: deque[str] = deque(maxlen=LINES)
        self._sampler: Sampler | None = None
        self._held = ExitStack()
        self._may_write = self._wrote = False
        self._before: bytes | None = None  # what the page has replaced, until the run owns the folder

    def __enter__(self) -> Self:
        if self.on:
            self._held.enter_context(keeping(self._logged))
            self._may_write = not (self.path / "results.json").exists()
            self._renewer.start()
        return self

    def begin(self, seconds: float, steps: int | None) -> None:
        """Start to write into the folder, whose run has more to do.

        Args:
            seconds: the training time until here.
            steps: after which the run ends; None: the clock ends it.
        """
        self._began, self._steps = seconds, steps
        self._may_write, self._phase = True, Phase.begun

    def describe(self, record: Record) -> None:
        """Set the facts on the run that the page shows; the folder is the run's from now on."""
        self._record, self._phase = record.redacted(), Phase.described

    def stop(self) -> bool:
        """Write no more: what comes next is the report itself, or the end; whether the thread has ended."""
        self._held.close()
        return self._renewer.stop()

    def publish(self) -> None:
        """The report is there: it stays, whatever happens from here on."""
        self._phase = Phase.published

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self.stop() or not (self.on and self._may_write):
            return
        if isinstance(error, SettingError) and self._phase < Phase.described:
            self._restore()
        elif error is not None and self._phase < Phase.published and (self._wrote or self._phase >= Phase.begun):
            self._ending = ending_of(error)
            self._renewer.draw()
        elif self._phase >= Phase.begun and self._is_live():
            self._ending = Ending(0, "")
            self._renewer.draw()

    def _restore(self) -> None:
        """Leave the folder as it was before the page."""
        if not self._wrote:
            return
        with suppress(OSError):
            (self.path / PAGE).unlink() if self._before is None else (self.path / PAGE).write_bytes(self._before)

    def _is_live(self) -> bool:
        """Whether the page is still one of these, because no report has taken its place."""
        with suppress(OSError, ValueError):
            return SIGN in (self.path / PAGE).read_text(encoding="utf-8")
        return False

    def _draw(self) -> None:
        """Sample the machine and write the page."""
        if not self._may_write:
            return
        if self._sampler is None:
            self._sampler = Sampler(self.ranks.device)
        else:
            self._sampler.sample()
        run = self._status(self._sampler.series())
        if not self._wrote and self._phase < Phase.described and (self.path / PAGE).is_file():
            self._before = (self.path / PAGE).read_bytes()
        self._renewer.write(title_of(run), sections(run), rests=self._ending is not None)
        self._wrote = True

    def _status(self, samples: dict[str, list[float]]) -> Status:
        metrics = evenly_spaced(self.path / "metrics.jsonl")
        seconds = float(metrics[-1]["seconds"]) if metrics else 0.0
        done = [metrics[-1]["step"] / self._steps] if metrics and self._steps else [0.0]
        if self.minutes is not None:  # whichever comes first ends the run
            done.append(seconds / (60 * self.minutes))
        training = next((work for work in under_way() if work.label == "training"), None)
        logs, count = tails(self.path / "logs") if self.ranks.size > 1 else ({0: cleaned(self._logged)}, 1)
        exchanges, span = self.ranks.traffic.exchange_seconds, seconds - self._began
        history = read_lines(self.path / "history.jsonl", only_good=True)
        return Status(
            self.path,
            self._renewer.every,
            self._record.with_history(history),
            metrics,
            self._steps,
            None if training is None or self._ending else training.seconds_left,
            None if self._phase < Phase.begun else min(max(done), 1.0),
            exchange_wait=min(exchanges / span, 1.0) if self.ranks.size > 1 and span > 0 else None,
            activities=[] if self._ending else [redact(work.line()) for work in under_way()],
            samples=samples,
            logs=logs,
            num_logs=count,
            ending=self._ending,
        )


def ending_of(error: BaseException) -> Ending:
    """How a run that has met this error stops."""
    cause: Any = error
    if not isinstance(getattr(error, "status", None), int) and isinstance(error, Exception):
        cause = storage_failure(error) or memory_failure(error) or error
    status = getattr(cause, "status", None)
    if isinstance(status, int):
        return Ending(status, redact(" ".join(str(cause).split())))
    if isinstance(error, KeyboardInterrupt):
        return Ending(130, "stopped by SIGINT")
    trace = redact("".join(traceback.format_exception(error)))
    return Ending(1, redact(f"{type(error).__name__}: {first_line(error)}"), trace)


def clock(now: float | None = None) -> str:
    """A moment, by default this one, in UTC."""
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(now))


def evenly_spaced(path: Path, count: int = MAX_POINTS) -> list[LogLine]:
    """At most so many lines of metrics.jsonl, evenly spaced, the last whole one among them; none of a missing file."""
    if not path.is_file():
        return []
    *whole, _torn = path.read_bytes().split(b"\n")
    lines = []
    for text in whole[::-1][:: -(-len(whole) // count) or 1][::-1]:
        with suppress(ValueError, RecursionError):  # of a damaged line, which is the run folder's to report
            line = json.loads(text)
            if isinstance(line, dict) and is_number(line.get("step")) and is_number(line.get("seconds")):
                lines.append(line)
    return lines


def tails(folder: Path) -> tuple[dict[int, list[str]], int]:
    """The last lines by rank of the logs in a run's folder `logs`, and how many logs there are in all."""
    logs = [
        (int(match[1]), path) for path in folder.glob("*.log") if (match := re.fullmatch(r"rank(\d+)\.log", path.name))
    ]
    newest = sorted(logs, key=lambda log: log[1].stat().st_mtime, reverse=True)[:MAX_RANKS]
    return {rank: last_lines(path) for rank, path in sorted(newest)}, len(logs)


def last_lines(path: Path) -> list[str]:
    """The last lines of a log."""
    with path.open("rb") as log:
        size = log.seek(0, os.SEEK_END)
        log.seek(max(0, size - BYTES))
        lines = log.read().decode("utf-8", errors="replace").split("\n")
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
