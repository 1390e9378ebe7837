"""What a run gives to others: students as model folders with their cards, results.json, and the report."""

import copy
import logging
import os
import shlex
from pathlib import Path
from typing import Any

from distill.models.export_folder import export
from distill.models.pooling import SAVED_AS, SavedPooling
from distill.report import report, summary
from distill.report.model_card import model_card, use_of_run
from distill.runs.baseline import advice
from distill.runs.callbacks import kept_snapshots
from distill.runs.describe import training_facts
from distill.runs.profile.phases import CHECKPOINT, phase
from distill.runs.record import Record
from distill.runs.run import Run
from distill.runs.state import State
from distill.runs.step import Callback, StepResult
from distill.runtime.errors import first_line
from distill.runtime.host import storage_failure
from distill.runtime.jsonl import read_lines

logger = logging.getLogger(__name__)


class Snapshots(Callback):
    """Keeps the student after the steps that the settings name, as `snapshots/step-N` with a card of the run so far."""

    def __init__(self, run: Run, so_far: Record, state: State) -> None:
        """`so_far`: the record of the run as it begins; `state`: of the training."""
        self.run, self.so_far, self.state = run, so_far, state
        train = run.config.train
        self.steps, self.every = train.snapshots or [], train.snapshot_every

    def after_step(self, step: StepResult) -> None:
        """Write the student where there is a snapshot after this step, and none yet from before an interruption.

        It comes before the step's checkpoint: a run that resumes from there has the snapshot, and one that was killed
        in between comes to this step again.
        """
        due = step.step in self.steps or (self.every is not None and step.step % self.every == 0)
        if due and not step.diverged:
            path, ranks = self.run.folder.snapshots_path / f"step-{step.step}", self.run.ranks
            with phase(CHECKPOINT):
                if not ranks.broadcast(path.exists()):
                    student = self.run.pair.whole_student(ranks)
                    ranks.decide(lambda: self._write(path, student))  # which the next exchange waits for

    def _write(self, path: Path, student: Any) -> None:
        note = f"This is the student after step {self.state.step}. The run continued; its report has the scores."
        record = self.so_far.changed(
            snapshot=self.state.step,
            notes=[note, *self.so_far.notes],
            training=training_facts(self.state, self.run.data.batches, []),
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        _export(self.run, student, path, record.redacted(), durable=True)

    def warn_of_past(self, step: int) -> None:
        """Log the steps of snapshots that a run which goes on from this step will not keep any more."""
        due = {*self.steps, *(range(self.every, step + 1, self.every) if self.every is not None else ())}
        kept = kept_snapshots(self.run.folder.snapshots_path)
        if past := sorted(one for one in due - {*kept} if one <= step):
            logger.warning(
                f"train.snapshots and train.snapshot_every ask for {len(past)} of a step up to {past[-1]}, but the run "
                f"resumes after step {step}: to get them, start another run (hydra.run.dir=DIR)"
            )


def write_outputs(run: Run, record: Record, resolved: str) -> None:
    """Write student, report and, last of all, results.json, which makes the run a finished one; all ranks call it."""
    student = run.pair.whole_student(run.ranks)
    run.ranks.decide(lambda: _write_outputs(run, student, record, resolved))


def _write_outputs(run: Run, student: Any, record: Record, resolved: str) -> None:
    folder, path = run.folder, run.folder.path
    _export(run, student, path / "student", record)
    written = f"Report: {path / 'report.html'}"
    try:
        report.write(path, record, read_lines(folder.metrics_path), resolved)
    except Exception as error:  # the student is there, and the report can be made at any time
        failure = storage_failure(error) or f"{type(error).__name__}: {first_line(error)}"
        written = (
            f"No report ({failure}): `{shlex.join(['distill', 'report', f'run={os.path.abspath(path)}'])}` writes it."
        )
    folder.write_results(record)
    ends = [summary.findings(record), f"{written}   Student: {path / 'student'}", advice(record, path)]
    logger.info("\n".join(filter(None, ends)))


def _export(run: Run, student: Any, path: Path, record: Record, durable: bool = False) -> None:
    """Write a folder that gives the student back when it is loaded as its card says."""
    use = use_of_run(record)
    auto_class = None if use.own else use.auto_class
    tokenizer = run.pair.tokenizer
    if record.corpus.chat_template is not None:  # that of the teacher's tokenizer may be another one
        tokenizer = copy.copy(tokenizer)
        tokenizer.chat_template = record.corpus.chat_template
    origin = record.student.origin
    vectors = None
    if origin is not None and origin.encodes in SAVED_AS and not use.own:
        vectors = SavedPooling("", origin.encodes, normalizes=bool(origin.normalizes))
    export(student, tokenizer, path, model_card(record), durable, auto_class, vectors)
