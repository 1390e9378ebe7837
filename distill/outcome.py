"""What a training leaves: students kept on the way, scores side by side, results.json, the student and its report."""

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from distill.config.settings import Config
from distill.distributed import Backend
from distill.evaluation.significance import ModelLosses, compare_models
from distill.evaluation.speed import tokens_per_second
from distill.models.export_folder import export
from distill.report import report, summary
from distill.report.model_card import model_card
from distill.runs.checkpoint import State
from distill.runs.curve import Curve
from distill.runs.describe import backend_facts, data_wait, model_facts, training_facts
from distill.runs.divergence import ruined_scores, weights_are_finite
from distill.runs.facts import Agreement, EvaluationSet, HistoryPoint, Model, Resampled
from distill.runs.history import Examination, StudentHistory
from distill.runs.metrics import Metrics, RunLog
from distill.runs.milestones import Milestones
from distill.runs.pair import Pair, load_twin
from distill.runs.parts import from_json
from distill.runs.record import Record
from distill.runs.run_folder import RunFolder
from distill.runs.step import Observer
from distill.runs.twin import BaselineRun
from distill.runtime.errors import Diverged, first_line
from distill.runtime.jsonl import read_lines
from distill.runtime.storage import storage_failure
from distill.tasks import Prepared
from distill.train import Training

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Followers:
    """Who follows a training: the observers of its steps, and the history of its student."""

    log: RunLog
    metrics: Metrics
    curve: Curve
    milestones: Milestones
    history: StudentHistory

    @property
    def observers(self) -> tuple[Observer, ...]:
        """In the order in which the loop calls them."""
        return self.metrics, self.curve, self.milestones


def make_milestones(
    config: Config,
    folder: RunFolder,
    known: Record,
    pair: Pair,
    data: Prepared,
    backend: Backend,
) -> Milestones:
    """What keeps the student after the steps that the settings name, with a model card of the run so far.

    Args:
        known: the record of the run as it begins.
    """

    def write(path: Path, state: State) -> None:
        note = f"This is the student after step {state.step}; the run went on, and its report has the scores."
        record = replace(
            known,
            snapshot=state.step,
            notes=[note, *known.notes],
            training=training_facts(state, data.batches, []),
            backend=backend_facts(backend, config, data.batches, state.syncs),
        )
        whole = pair.whole_student(backend)
        if folder.writes:
            path.parent.mkdir(parents=True, exist_ok=True)
            export(whole, pair.tokenizer, path, model_card(record.redacted()), durable=True)

    wanted = frozenset(config.train.milestones or [])

    def exists(path: Path) -> bool:
        there: bool = backend.broadcast(path.exists()) if folder.checkpoints.by_all_ranks else path.exists()
        return there

    takes_part = folder.writes or folder.checkpoints.by_all_ranks
    return Milestones(folder.milestones_path, wanted, config.train.milestone_every, write, exists, takes_part)


def finished_record(
    known: Record,
    config: Config,
    pair: Pair,
    data: Prepared,
    training: Training,
    followers: Followers,
    twin: BaselineRun | None,
) -> Record:
    """The record of a training that has ended; all ranks score.

    Args:
        known: the record of the run as it began, with its profile where it has one, and what has ended it.
    """
    lines, folder = followers.history.lines(), followers.history.folder
    trained = training_facts(training.state, data.batches, lines)
    return replace(
        score_models(known, config, pair, training, followers.history, twin),
        finished=True,
        training=replace(
            trained,
            data_wait=data_wait(read_lines(folder.metrics_path)),
            ended_by=known.training.ended_by,
            length=config.train.length,
            evaluation_seconds=followers.history.examination.evaluator.readers.seconds,
        ),
        backend=backend_facts(training.backend, config, data.batches, training.state.syncs),
        history=[HistoryPoint.of(line) for line in lines],
        curve=followers.curve.recorded(),
        snapshots=followers.milestones.found(),
    )


def score_models(
    known: Record, config: Config, pair: Pair, training: Training, history: StudentHistory, twin: BaselineRun | None
) -> Record:
    """The record with the scores of teacher, student and, where `evaluate.twin` names its run, the no-teacher twin.

    Several teachers stand there as the one that they are together, with each of them in its `members`.
    """
    evaluator, sets = history.examination.evaluator, history.examination.sets
    # A twin only starts from its teacher's layers, and is not compared with it; a teacher with a tokenizer of its own
    # has no score on the student's tokens.
    scored = pair.scored_teachers if known.teacher else []
    teacher = pair.teacher if scored else None
    entries: dict[str, tuple[Any, Any]] = {"teacher": (known.teacher, teacher)} if known.teacher and scored else {}
    for member in scored:
        if known.teacher and member.name:
            entries[f"teacher {member.name}"] = known.teacher.members[member.name], member.model
    entries["student"] = known.student, pair.student
    if twin is not None:
        model = load_twin(config, pair).to(training.backend.device)
        entries["twin"] = model_facts(Model, type(model).__name__, model), model
    filled, losses = score_each(entries, history)
    scores = {each.name: filled["student"].scores.get(each.name, {}) for each in evaluator.measures}
    refuse_ruined(training, pair, scores)
    whole = filled.get("teacher", known.teacher)
    if whole is not None and scored:
        members = {member.name: filled[f"teacher {member.name}"] for member in scored if member.name}
        whole = replace(whole, members=members)
    agrees = teacher is not None and pair.kind.vocabulary
    agreement = evaluator.agree(pair.student, teacher, sets) if agrees else None
    baseline = None
    if twin is not None:
        baseline = twin.beside(filled["twin"], config.evaluate.twin, compared(losses, history.examination))
    return replace(
        known,
        teacher=whole,
        student=filled["student"],
        baseline=baseline,
        agreement=None if agreement is None else {name: Agreement(**each) for name, each in agreement.items()},
        evaluation={data.name: from_json(EvaluationSet, evaluator.describe(data)) for data in sets},
    )


def score_each(
    entries: dict[str, tuple[Any, Any]], history: StudentHistory
) -> tuple[dict[str, Any], dict[str, ModelLosses]]:
    """Each model's part of the record with its scores and its speed, and its losses by row where these were wanted.

    Args:
        entries: by what the model is called, its part of the record without scores, and the model.
    """
    examination, sets = history.examination, history.examination.sets
    models = [model for _, model in entries.values()]
    speeds = tokens_per_second(examination.evaluator, models, sets[0]) if sets else [0.0] * len(models)
    filled: dict[str, Any] = {}
    losses: dict[str, ModelLosses] = {}
    for (label, (facts, model)), speed in zip(entries.items(), speeds, strict=True):
        # What an earlier process scored has left no losses by row, by which the student is compared with its twin.
        lacking = label != "student" or (examination.by_row and history.row_losses is None)
        before = None if lacking else history.last_scores()
        keep = label if label in ("teacher", "student") else None  # whose agreement is measured
        if before:
            scores, by_row = before, history.row_losses
        else:
            scores, by_row = examination.score(model, label, keep)
        losses[label] = by_row or {}
        filled[label] = replace(facts, scores=scores, tokens_per_second=speed)
    return filled, losses


def compared(losses: dict[str, ModelLosses], examination: Examination) -> dict[str, dict[str, Resampled]]:
    """The paired bootstrap of student and twin, by measure and set."""
    by_measure = compare_models(losses["student"], losses["twin"], examination.sets, examination.evaluator.scoring)
    return {
        measure: {name: Resampled(**each.as_dict()) for name, each in by_set.items()}
        for measure, by_set in by_measure.items()
    }


def refuse_ruined(training: Training, pair: Pair, scores: dict[str, dict[str, float | None]]) -> None:
    """Raises Diverged where the student's weights or scores are those of a ruined one, so that nothing is published.

    The checkpoints that may be ruined are set aside, so that the same command goes on from one before them.
    """
    ruined = ruined_scores(scores, len(pair.tokenizer), training.settings.max_loss_ratio)
    finite = weights_are_finite(dict(pair.student.named_parameters()))
    if float(training.backend.sum(torch.tensor(float(not finite)))):
        ruined = ["weights that are not finite"]
    if not ruined:
        return
    if training.backend.rank == 0:
        training.checkpoints.set_ruined_aside(training.state.level.sane_step)
    raise Diverged(
        f"the student is ruined ({', '.join(ruined)}), so it is not published; lower optimizer.lr, in another folder "
        "(hydra.run.dir=DIR)"
    )


def write_outputs(folder: RunFolder, record: Record, pair: Pair, resolved: str, backend: Backend) -> None:
    """Write student, report and, last of all, results.json, which makes the run a finished one; rank 0 does."""
    student = pair.whole_student(backend)
    if not folder.writes:
        return
    path = folder.path
    export(student, pair.tokenizer, path / "student", model_card(record))
    written = f"Report: {path / 'report.html'}"
    try:
        report.write(path, record, read_lines(folder.metrics_path), resolved)
    except Exception as error:  # the student is there, and the report can be made at any time
        failure = storage_failure(error) or f"{type(error).__name__}: {first_line(error)}"
        written = f"No report ({failure}): `distill report run={path}` writes it."
    folder.write_results(record)
    logger.info(f"{summary.findings(record)}\n{written}   Student: {path / 'student'}")
