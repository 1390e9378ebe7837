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
from distill.runs.callbacks import Snapshots
from distill.runs.describe import training_facts
from distill.runs.record import Record
from distill.runs.run import Run
from distill.runs.state import State
from distill.runtime.errors import first_line
from distill.runtime.host import storage_failure
from distill.runtime.jsonl import read_lines

logger = logging.getLogger(__name__)


def make_snapshots(run: Run, so_far: Record, state: State) -> Snapshots:
    """What keeps the student after the steps that the settings name, with a model card of the run so far.

    Args:
        so_far: the record of the run as it begins.
        state: of the training.
    """

    folder, ranks, settings = run.folder, run.ranks, run.config.train

    def write(path: Path) -> None:
        if ranks.broadcast(path.exists()):
            return
        full_student = run.pair.whole_student(ranks)
        ranks.decide(lambda: write_on_rank_0(path, full_student))  # which the next exchange waits for

    def write_on_rank_0(path: Path, full_student: Any) -> None:
        note = f"This is the student after step {state.step}. The run continued; its report has the scores."
        record = so_far.changed(
            snapshot=state.step,
            notes=[note, *so_far.notes],
            training=training_facts(state, run.data.batches, []),
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        _export(run, full_student, path, record.redacted(), durable=True)

    return Snapshots(folder.snapshots_path, frozenset(settings.snapshots or []), settings.snapshot_every, write)


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
