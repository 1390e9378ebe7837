"""One page for several jobs, such as the stages of a chain: the state of each, how far it is, and where its page is."""

import logging
import os
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from distill.report import live, page
from distill.report.live import PAGE, STATE
from distill.report.live_logs import read_json
from distill.report.page import Block, Link, Section, Table
from distill.report.words import NONE, count_of, is_number, number, percent, time_of
from distill.runs.record import Record
from distill.runs.results_file import read_results
from distill.runtime.errors import SettingError, first_line
from distill.runtime.files import atomic
from distill.runtime.host import storage_failure
from distill.runtime.progress import duration, in_a_sentence
from distill.runtime.redaction import redact

EVERY = 15.0  # seconds between two pages
MAX_SCORES = 4  # of a job, in the table

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Job:
    """One line of the page."""

    name: str
    folder: Path


class JobsPage:
    """Keeps `folder`/report.html up to date while jobs run; a context manager, which writes the error that ends them.

    A thread writes the page; it neither delays the jobs nor ends them.
    """

    def __init__(self, folder: Path, title: str, jobs: list[Job], every: float = EVERY) -> None:
        self.path, self.title, self.jobs, self.every = folder / PAGE, title, jobs, every
        self.current: Path | None = None  # the folder of the job that runs now
        self._blocks: list[Block] = []
        self._began, self._failed = time.time(), False
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._work, name="jobs page", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopped.set()
        self._thread.join(self.every)
        if self._thread.is_alive():  # storage hangs: a second writer would only hang, too
            return
        if error is None:
            self._write("All jobs are finished.", ended=True)
        else:
            ended = f"Stopped: {redact(first_line(error))}."
            self._write(ended, ended=True, resting=True)

    def end_with(self, blocks: list[Block]) -> None:
        """What the page ends with, once all jobs have ended."""
        self._blocks = blocks

    def start(self, folder: Path) -> None:
        """This job runs from now on."""
        self.current = folder

    def _work(self) -> None:
        while True:
            self._write(f"Under way for {duration(time.time() - self._began)}.")
            if self._stopped.wait(self.every):
                return

    def _write(self, state: str, ended: bool = False, resting: bool = False) -> None:
        """Write the page; log only the first failure."""
        try:
            current = None if ended else self.current
            parts = sections(self.jobs, self.path.parent, state, current)
            parts += [Section("Results", self._blocks)] if self._blocks and ended else []
            if ended and not resting:
                with atomic(self.path) as new:
                    new.write_text(page.html(self.title, parts), encoding="utf-8")
            else:
                seconds = live.RESTING if resting else self.every
                live.write(self.path, self.title, parts, seconds, watched=not resting)
        except Exception as error:
            if not self._failed:
                reason = storage_failure(error) or f"{type(error).__name__}: {first_line(error)}"
                logger.warning(f"cannot write {self.path} ({reason}); the jobs continue without it")
            self._failed = True


def sections(jobs: list[Job], folder: Path, state: str, current: Path | None) -> list[Section]:
    """The page: how many jobs are finished, and a table of all."""
    rows = [row_of(job, folder, job.folder == current) for job in jobs]
    num_finished = sum(row[1] == "finished" for row in rows)
    opening: list[Block] = [f"{num_finished} of {len(jobs)} jobs are finished. {state} Written {live.clock()}."]
    table = Table(["Job", "State", "Progress", "Scores of the student"], rows, text=True)
    return [Section("", opening), Section("Jobs", [table])]


def row_of(job: Job, folder: Path, runs: bool) -> list[str]:
    """Name (a link to its page, where there is one), state, progress and scores of a job."""
    has_page = (job.folder / PAGE).is_file()
    name = Link(job.name, os.path.relpath(job.folder / PAGE, folder)) if has_page else job.name
    record = _record(job.folder)
    if record.finished and not runs:
        training = record.training
        took = " in ".join(filter(None, [count_of(training.steps, "step"), time_of(training.seconds)]))
        return [name, "finished", took, scores_of(record)]
    written = read_json(job.folder / STATE)
    live_state = written if is_number(written.get("written")) and is_number(written.get("every")) else {}
    if runs and live_state.get("state") == "stopped":  # of the start before this one
        live_state = {}
    if live_state and (runs or live_state.get("state") == "stopped" or not _is_old(live_state)):
        return [name, "under way" if runs else str(live_state.get("state")), progress_of(live_state), NONE]
    if live_state:
        return [name, "no news", f"since {live.clock(live_state['written'])}; {progress_of(live_state)}", NONE]
    step = newest_step(job.folder / "metrics.jsonl")
    progress = f"step {number(step)}" if step else NONE
    return [name, "under way" if runs else "stopped" if step else "waiting", progress, NONE]


def progress_of(state: dict[str, Any]) -> str:
    """How far a job is, by its progress.json."""
    steps = f" of {number(state['steps'])}" if is_number(state.get("steps")) else ""
    parts = [
        percent(state["share"]) if is_number(state.get("share")) else None,
        f"step {number(state['step'])}{steps}" if state.get("step") else None,
        f"{duration(state['seconds_left'])} left" if is_number(state.get("seconds_left")) else None,
    ]
    amounts = ", ".join(filter(None, parts))
    return ": ".join(filter(None, [amounts, str(state.get("message") or "")])) or str(state.get("doing") or NONE)


def _record(folder: Path) -> Record:
    """The record of a job, or an empty one where there is none to be read: another process may be at work there."""
    with suppress(OSError, SettingError):
        return read_results(folder / "results.json")
    return Record()


def scores_of(record: Record) -> str:
    """The first scores of the student, as text."""
    scores = [
        f"{in_a_sentence(measure.title)} {record.label_of(key)} {number(value)}"
        for name, measure in record.measures.items()
        for key, value in (record.student.scores.get(name, {}) if record.student else {}).items()
        if is_number(value)
    ]
    return ", ".join(scores[:MAX_SCORES]) + (", ..." if len(scores) > MAX_SCORES else "") or NONE


def newest_step(path: Path) -> int:
    """The step of the last whole line of a log; 0 where there is none."""
    try:
        with path.open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - 16_384))
            *whole_lines, _torn = log.read().split(b"\n")
    except OSError:
        return 0
    last = read_json(whole_lines[-1]) if whole_lines else {}
    return int(last["step"]) if is_number(last.get("step")) else 0


def _is_old(state: dict[str, Any]) -> bool:
    """Whether something new should long have come from a job that writes its progress."""
    return bool(time.time() - state["written"] > 3 * state["every"] + 30)
