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
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from distill.distributed import Ranks
from distill.report import figures, page, report
from distill.report.page import Block, Code, Section, Tiles, prose
from distill.report.summary import reproduced_by
from distill.report.words import NONE, number, percent, time_of
from distill.runs.profile.sampler import Sampler
from distill.runs.record import Record
from distill.runtime.errors import SettingError, first_line, printable
from distill.runtime.host import failure_of, storage_failure
from distill.runtime.jsonl import LogLine, read_lines
from distill.runtime.progress import keeping, under_way
from distill.runtime.redaction import redact

PAGE = "report.html"
RESTING = 60.0  # seconds between two looks at a page whose run has stopped: the same command may bring it back
PATIENCE = 30.0  # seconds that the end of a run waits for a page that is being written
SIGN = 'id="overdue"'  # is in a page that renews itself, and in no report
MAX_POINTS = 500  # lines of metrics that are drawn; no screen shows more
LINES, BYTES, LONGEST = 30, 16_384, 2000  # of each log: lines shown, bytes read, characters of a line
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")  # of terminals: colours, and how a progress line is drawn anew
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
    title = "The last lines of every rank" if len(run.logs) > 1 else "The last lines of its log"
    return [Section("", [*state, *opening.blocks]), *others, Section(title, _logs(run))]


def _under_way(run: Status) -> list[Block]:
    idle = "between two phases" if run.record.corpus.name else "preparing models and text"
    now = "; ".join(run.activities) or idle
    renewed = f"Written {clock()}; reloads every {time_of(run.every)}, and becomes the report when the run ends."
    return [f"Under way: {now}.", _tiles(run), f"{renewed} Folder: {run.folder}."]


def _stopped(run: Status, ending: Ending) -> list[Block]:
    if ending.status == 0:
        command = shlex.join(["distill", "report", f"run={os.path.abspath(run.folder)}"])
        return ["The run is finished, but its report could not be written. This command writes it:", Code(command)]
    stopped: list[Block] = [f"Stopped with status {ending.status}: {ending.message}", prose("after", ending.status)]
    stopped += [*reproduced_by(run.record.command_from_anywhere), f"Folder: {run.folder}. Written {clock()}."]
    return [*stopped, Code(ending.traceback, "Traceback"), _tiles(run)]


def _tiles(run: Status) -> Tiles:
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
    return Tiles([(value, text) for value, text in candidates if value != NONE and text])


def _logs(run: Status) -> list[Block]:
    shown = {rank: "\n".join(lines) or "nothing yet" for rank, lines in run.logs.items()}
    if len(shown) <= 1:
        return [Code(text, wrap=True) for text in shown.values()]
    note = f"Rank 0 first; the others unfold. The logs themselves lie in {run.folder}/logs."
    return [note, *(Code(text, f"rank {rank}" if rank else "", wrap=True) for rank, text in sorted(shown.items()))]


class Renewer:
    """Draws a page every so many seconds in a thread; only the first failure is logged, and none is raised."""

    def __init__(self, path: Path, every: float, draw: Callable[[], None]) -> None:
        self.path, self.every, self._draw, self._failed = path, every, draw, False
        self.stopped = threading.Event()
        self._thread = threading.Thread(target=self._work, name="report", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> bool:
        """Draw no more; whether the thread has ended: it may hang in storage, where a second writer would hang, too."""
        self.stopped.set()
        if self._thread.is_alive():
            self._thread.join(PATIENCE)
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
        text = page.html(title, parts, max(RESTING, self.every) if rests else self.every, watched=not rests)
        new = self.path.with_name(f".{self.path.name}.live")  # not that of `atomic`, which the report may use meanwhile
        new.write_text(text, encoding="utf-8")
        if rests or not self.stopped.is_set():
            new.replace(self.path)
        else:
            new.unlink()


class RunPage:
    """The page of a run from its second minute on; a context manager that writes the error where the run fails.

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
        self.minutes, self.ranks = minutes, ranks
        self.on = ranks.rank == 0 and bool(every)
        self._renewer = Renewer(path / PAGE, every or RESTING, self._draw)
        self._run = Status(path, every or RESTING, Record(recipe=recipe, command=command, started_in=os.getcwd()))
        self._may_write = self._is_published = self._is_described = False
        self._began: float | None = None  # seconds of training before this process; None: it is preparing
        self._logged: deque[str] = deque(maxlen=LINES)
        self._sampler: Sampler | None = None
        self._held = ExitStack()
        self._before: bytes | None = None  # what the page replaces until the run owns the folder
        self._wrote = False

    def __enter__(self) -> Self:
        if self.on:
            self._held.enter_context(keeping(self._logged))
            with suppress(OSError):
                self._before = self._renewer.path.read_bytes()
            self._may_write = not (self._run.folder / "results.json").exists()
            self._renewer.start()
        return self

    def begin(self, seconds: float, steps: int | None) -> None:
        """Start to write into the folder, whose run has more to do.

        Args:
            seconds: the training time until here.
            steps: after which the run ends; None: the clock ends it.
        """
        self._began, self._may_write, self._run = seconds, True, replace(self._run, steps=steps)

    def describe(self, record: Record) -> None:
        """Set the facts on the run that the page shows; the folder is the run's from now on."""
        self._is_described, self._run = True, replace(self._run, record=record.redacted())

    def stop(self) -> bool:
        """Write no more: what comes next is the report itself, or the end; whether the thread has ended."""
        self._held.close()
        return self._renewer.stop()

    def publish(self) -> None:
        """The report is there: it stays, whatever happens from here on."""
        self._is_described = self._is_published = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self.stop() or not (self.on and self._may_write):
            return
        if isinstance(error, SettingError) and not self._is_described:
            self._restore()
        elif error is not None and not self._is_published and (self._wrote or self._began is not None):
            self._end(ending_of(error))
        elif self._began is not None and self._is_live():
            self._end(Ending(0, ""))

    def _end(self, ending: Ending) -> None:
        self._run = replace(self._run, ending=ending)
        self._renewer.draw()

    def _restore(self) -> None:
        """Leave the folder as it was before the page."""
        path = self._renewer.path
        with suppress(OSError):
            if self._wrote:
                path.unlink() if self._before is None else path.write_bytes(self._before)

    def _is_live(self) -> bool:
        """Whether the page is still one of these, because no report has taken its place."""
        with suppress(OSError, ValueError):
            return SIGN in self._renewer.path.read_text(encoding="utf-8")
        return False

    def _draw(self) -> None:
        """Sample the machine and write the page."""
        if not self._may_write:
            return
        if self._sampler is None:
            self._sampler = Sampler(self.ranks.device)
        else:
            self._sampler.sample()
        run = self._now(self._sampler.series())
        self._renewer.write(title_of(run), sections(run), rests=run.ending is not None)
        self._wrote = True

    def _now(self, samples: dict[str, list[float]]) -> Status:
        run, several = self._run, self.ranks.size > 1
        metrics = evenly_spaced(run.folder / "metrics.jsonl")
        seconds = float(metrics[-1]["seconds"]) if metrics else 0.0
        done = [metrics[-1]["step"] / run.steps] if metrics and run.steps else [0.0]
        if self.minutes is not None:  # whichever comes first ends the run
            done.append(seconds / (60 * self.minutes))
        span = seconds - (self._began or 0.0)
        works = [] if run.ending else under_way()
        return replace(
            run,
            record=run.record.with_history(read_lines(run.folder / "history.jsonl", only_good=True)),
            metrics=metrics,
            left=next((work.seconds_left for work in works if work.label == "training"), None),
            fraction=None if self._began is None else min(max(done), 1.0),
            exchange_wait=min(self.ranks.traffic.exchange_seconds / span, 1.0) if several and span > 0 else None,
            activities=[redact(work.line()) for work in works],
            samples=samples,
            logs=tails(run.folder / "logs") if several else {0: cleaned(self._logged)},
        )


def ending_of(error: BaseException) -> Ending:
    """How a run that has met this error stops."""
    cause: Any = error
    if not isinstance(getattr(error, "status", None), int) and isinstance(error, Exception):
        cause = failure_of(error) or error
    status = getattr(cause, "status", None)
    if isinstance(status, int):
        return Ending(status, redact(" ".join(str(cause).split())))
    if isinstance(error, KeyboardInterrupt):
        return Ending(130, "stopped by SIGINT")
    trace = redact("".join(traceback.format_exception(error)))
    return Ending(1, redact(f"{type(error).__name__}: {first_line(error)}"), trace)


def clock() -> str:
    """This moment, in UTC."""
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())


def evenly_spaced(path: Path, count: int = MAX_POINTS) -> list[LogLine]:
    """At most so many lines of metrics.jsonl, evenly spaced, the last whole one among them; none of a missing file."""
    if not path.is_file():
        return []
    *whole, _torn = path.read_bytes().split(b"\n")
    lines = []
    for text in whole[::-1][:: -(-len(whole) // count) or 1][::-1]:
        with suppress(ValueError):  # of a damaged line, which is the run folder's to report
            lines.append(json.loads(text))
    return lines


def tails(folder: Path) -> dict[int, list[str]]:
    """The last lines by rank of the logs in a run's folder `logs`."""
    found = {}
    for path in folder.glob("rank[0-9]*.log"):
        with path.open("rb") as log:
            size = log.seek(0, os.SEEK_END)
            log.seek(max(0, size - BYTES))
            lines = log.read().decode("utf-8", errors="replace").split("\n")
        # The first one may have lost its beginning.
        found[int(path.stem.removeprefix("rank"))] = cleaned(lines[1:] if size > BYTES else lines)
    return found


def cleaned(lines: Iterable[str]) -> list[str]:
    """The last ones of these lines that are not empty, fit to be shown; of one that was drawn anew its last state."""
    shown = [line for text in lines if (line := ESCAPES.sub("", text.rstrip("\r").rpartition("\r")[2]).rstrip())]
    return [_shown(line) for line in shown[-LINES:]]


@lru_cache(maxsize=4096)  # the next page shows the same lines again, and the search for secrets is slow
def _shown(line: str) -> str:
    if len(line) > LONGEST:  # not cut, because half a secret would not be recognised
        return f"(a line of {len(line):,} characters)"
    return printable(redact(line))
