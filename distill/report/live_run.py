"""Keeps report.html of a run that is under way up to date, in a thread that neither delays the run nor ends it."""

import fcntl
import json
import logging
import os
import sys
import threading
import time
import traceback
from collections import deque
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypedDict

from distill.distributed import Ranks
from distill.report import live
from distill.report.live import PAGE, STATE
from distill.report.live_logs import LINES, Series, cleaned, earlier_lines, tails, thinned
from distill.report.live_sections import Ending, RunView, sections, title_of
from distill.report.words import is_number
from distill.runs.profile.sampler import Sampler
from distill.runs.record import Record
from distill.runs.run_files import file_of_another
from distill.runtime.errors import SettingError, first_line
from distill.runtime.files import atomic
from distill.runtime.host import memory_failure, storage_failure
from distill.runtime.jsonl import LogLine, read_lines, without_nan
from distill.runtime.progress import keeping, under_way
from distill.runtime.redaction import redact

PATIENCE = 30.0  # seconds that the end of a run waits for a page that is being written

logger = logging.getLogger(__name__)


class RunPage:
    """The page of a run from its first minute on; a context manager that writes the error where the run fails.

    Rank 0 alone writes, every `report.every` seconds. Only the first failure is logged. Nothing is written into a
    folder that holds a finished run, or where another process is at work, before `begin`. A run that is refused before
    `describe` leaves what was there before.
    """

    def __init__(
        self, path: Path, recipe: str, command: str, every: float | None, minutes: float | None, ranks: Ranks
    ) -> None:
        """
        Args:
            every: seconds between two pages; None or 0: there is none.
            minutes: after which the clock ends the training, if it does.
        """
        self.path, self.recipe, self.command, self.ranks = path, recipe, command, ranks
        self.every, self.minutes = every or 0.0, minutes
        self.on = ranks.rank == 0 and self.every > 0
        self._record = Record(recipe=recipe, command=command, started_in=os.getcwd())
        self._first_step = 0
        self._steps: int | None = None
        self._series, self._latest = Series(), LogLine()
        self._earlier: list[LogLine] | None = None  # lines of earlier starts, once they are read
        self._exchanged, self._until = 0.0, 0.0
        self._logged: deque[str] = deque(maxlen=LINES)
        self._sampler: Sampler | None = None
        self._held, self._stopped = ExitStack(), threading.Event()
        self._may_write = self._begun = self._owns = self._wrote = self._failed = False
        self._before: dict[Path, bytes | None] = {}  # what the page has replaced, until the run owns the folder
        self._is_new = not path.exists()
        self._published = False  # the report is there, which no page of a run that ends badly replaces
        self._thread = threading.Thread(target=self._work, name="report", daemon=True)

    def __enter__(self) -> Self:
        if self.on:
            self._held.enter_context(keeping(self._logged))
            self._may_write = is_free(self.path)
            self._thread.start()
        return self

    def describe(self, record: Record) -> None:
        """Set the facts on the run that the page shows; the folder is the run's from now on."""
        self._record, self._owns = record.redacted(), True

    def begin(self, first_step: int, seconds: float, steps: int | None) -> None:
        """Start to write into the folder, in which no other process is at work.

        Args:
            first_step, seconds: where it starts, and the training time until there.
            steps: after which it ends; None: the clock ends it.
        """
        self._first_step, self._until, self._steps = first_step, seconds, steps
        self._exchanged = self.ranks.traffic.exchange_seconds
        self._may_write = self._begun = True
        self._earlier = None  # only those up to this step: the others are made again

    def add(self, metrics: dict[str, float]) -> None:
        """A line of metrics.jsonl; costs microseconds."""
        if not self.on:
            return
        line: LogLine = dict(metrics)
        if self.ranks.size > 1:
            exchanged, span = self.ranks.traffic.exchange_seconds, max(metrics["seconds"] - self._until, 1e-9)
            line["exchange_wait"] = min((exchanged - self._exchanged) / span, 1.0)
            self._exchanged, self._until = exchanged, metrics["seconds"]
        self._series.add(line)
        self._latest = line

    def stop(self) -> None:
        """Write no more: what comes next is the report itself, or the end.

        The thread may still hang in storage then; it writes nothing once it returns.
        """
        self._held.close()
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join(PATIENCE)

    def publish(self) -> None:
        """The report is there: it stays, whatever happens from here on."""
        self._published = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        if self._thread.is_alive():  # storage hangs: a second writer would only hang, too
            return
        if isinstance(error, SettingError) and not (self._owns or self._published):
            self._restore()
        elif error is not None and not self._published and (self._begun or self._wrote):
            self._refresh(ending_of(error))
        elif (error is None or self._published) and self._begun and self.ranks.rank == 0:
            if self._is_live():
                self._refresh(Ending(0, ""))
            with suppress(OSError):
                (self.path / STATE).unlink(missing_ok=True)

    def _restore(self) -> None:
        """Leave the folder as it was before the page; one that was not there goes, where it holds nothing else."""
        for path, content in self._before.items():
            with suppress(OSError):
                path.unlink() if content is None else path.write_bytes(content)
        if self._is_new and self._wrote:
            with suppress(OSError):
                (self.path / ".lock").unlink(missing_ok=True)
                self.path.rmdir()

    def _is_live(self) -> bool:
        """Whether the page is still one of these, because no report has taken its place."""
        with suppress(OSError, ValueError):
            return live.SIGN in (self.path / PAGE).read_text(encoding="utf-8")
        return False

    def _work(self) -> None:
        while not self._stopped.wait(self.every):
            self._refresh()

    def _refresh(self, ending: Ending | None = None) -> None:
        """Sample the machine and write the page; log only the first failure."""
        if not (self.on and self._may_write):
            return
        try:
            self._sample()
            run = self._view(ending)
            resting = ending is not None
            every = max(live.RESTING, self.every) if resting else self.every
            for path in (self.path / PAGE, self.path / STATE):
                if not self._owns and path not in self._before:
                    self._before[path] = path.read_bytes() if path.is_file() else None
            live.write(
                self.path / PAGE, title_of(run), sections(run), every, not resting,
                wanted=lambda: resting or not self._stopped.is_set(),
            )  # fmt: skip
            self._wrote = True
            with atomic(self.path / STATE) as new:
                new.write_text(json.dumps(without_nan(state_of(run))), encoding="utf-8")
        except Exception as error:
            if not self._failed:
                reason = storage_failure(error) or f"{type(error).__name__}: {first_line(error)}"
                logger.warning(f"cannot write report.html ({reason}); the run continues without it")
            self._failed = True

    def _sample(self) -> None:
        if self._sampler is None:
            self._sampler = Sampler(self.every, self.ranks.device)
            self._sampler.begin()
        else:
            self._sampler.sample()

    def _earlier_lines(self) -> list[LogLine]:
        """The metrics of the steps before this start of the run; read anew once the run has begun."""
        begun, lines = self._begun, self._earlier
        if lines is None:
            lines = earlier_lines(self.path / "metrics.jsonl", self._first_step if begun else sys.maxsize)
            if begun is self._begun:  # the run may have begun meanwhile, and some of these lines will be written again
                self._earlier = lines
        return lines

    def _view(self, ending: Ending | None) -> RunView:
        earlier = self._earlier_lines()
        latest = self._latest or (earlier[-1] if earlier else {})
        logs, count = tails(self.path / "logs") if self.ranks.size > 1 else ({0: cleaned(list(self._logged))}, 1)
        step = int(latest.get("step") or self._first_step)
        fraction, left = self._progress(step, latest.get("seconds"))
        history = read_lines(self.path / "history.jsonl", only_good=True)
        return RunView(
            folder=str(self.path),
            written=live.clock(),
            every=self.every,
            record=self._record.with_history(history),
            step=step,
            steps=self._steps,
            left=None if ending else left,
            fraction=fraction,
            activities=[] if ending else [redact(work.line()) for work in under_way()],
            latest=latest,
            points=thinned([*earlier, *self._series.points()]),
            machine=self._sampler.series() if self._sampler else {},
            logs=logs,
            num_logs=count,
            ending=ending,
        )

    def _progress(self, step: int, seconds: Any) -> tuple[float | None, float | None]:
        """How much of the run is done, and the seconds that are left; by steps or by the clock, whichever ends it."""
        if not self._begun:
            return None, None
        training = next((work for work in under_way() if work.label == "training"), None)
        fractions = [step / self._steps] if self._steps else []
        lefts = [training.seconds_left] if training is not None else []
        if self.minutes is not None and is_number(seconds):
            fractions.append(seconds / (60 * self.minutes))
            lefts.append(max(60 * self.minutes - seconds, 0.0))
        estimates = [left for left in lefts if left is not None]
        return (min(max(fractions), 1.0) if fractions else None), (min(estimates) if estimates else None)


def is_free(path: Path) -> bool:
    """Whether a run that is about to begin may write into the folder: without results and without a live process."""
    if (
        not path.is_dir()
        or file_of_another(path)
        or (path / "results.json").exists()
        or (path / PAGE).is_dir()
        or (path / STATE).is_dir()
    ):
        return False
    try:
        with (path / ".lock").open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return True
    except OSError:  # another process is at work there
        return False
    return True


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


class RunState(TypedDict):
    """The content of progress.json."""

    state: str  # stopped, under way
    written: float  # seconds of the clock
    every: float  # seconds until the next one
    step: int
    steps: int | None
    share: float | None  # of the run, that is done
    seconds_left: float | None
    doing: str
    status: int | None  # of a process that has ended
    message: str  # that it has ended with


def state_of(run: RunView) -> RunState:
    """How far a run is, for other programs and for the page of the sweep or the chain that it belongs to."""
    return RunState(
        state="stopped" if run.ending else "under way",
        written=time.time(),
        every=run.every,
        step=run.step,
        steps=run.steps,
        share=run.fraction,
        seconds_left=run.left,
        doing=run.activities[-1] if run.activities else "",
        status=run.ending.status if run.ending else None,
        message=run.ending.message if run.ending else "",
    )
