"""What a training has come to: teacher, student and baseline scored side by side, for the record of the run."""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from distill.data.sequence_format import causal_format
from distill.evaluation.evaluator import Evaluator
from distill.evaluation.samples import TEMPERATURE, choose_prompts, continue_with_each, num_new_tokens, text_of
from distill.evaluation.significance import ModelLosses, compare_gaps, compare_models
from distill.evaluation.speed import tokens_per_second
from distill.runs.callbacks import kept_snapshots
from distill.runs.describe import data_wait, model_facts, training_facts
from distill.runs.divergence import refuse_diverged
from distill.runs.facts import (
    Agreement,
    EvaluationSet,
    GapClosed,
    HistoryPoint,
    Model,
    Resampled,
    Sample,
    Samples,
    fraction_closed,
)
from distill.runs.identity import digest_of
from distill.runs.pair import load_baseline
from distill.runs.periodic_evaluation import PeriodicEvaluation
from distill.runs.record import Record
from distill.runs.run import Run
from distill.runs.state import State
from distill.runs.trackers import Tracker
from distill.runtime.jsonl import read_lines

logger = logging.getLogger(__name__)


def complete_record(begun: Record, run: Run, state: State, evaluation: PeriodicEvaluation) -> Record:
    """The record of a training that has ended; all ranks score.

    Args:
        begun: the record of the run as it began, with its profile where it has one, and what has ended it.
    """
    lines = evaluation.lines()
    trained = training_facts(state, run.data.batches, lines)
    scored = score_models(begun, run, state, evaluation)
    log_scores(scored, state.step, evaluation.tracker)
    return scored.changed(
        finished=True,
        training=trained.changed(
            data_wait=data_wait(read_lines(run.folder.metrics_path)),
            ended_by=begun.training.ended_by,
            length=run.config.train.length,
            evaluation_seconds=evaluation.evaluator.readers.seconds,
            scored_sequences=run.scored_on_the_way,
        ),
        history=[HistoryPoint.of(line) for line in lines],
        snapshots=kept_snapshots(run.folder.snapshots_path),
    )


def log_scores(record: Record, step: int, tracker: Tracker) -> None:
    """Send the scores of all models: in the course of the training the student alone has some, perhaps of a part."""
    tracker.log_metrics(
        {
            f"{name}/{measure}/{data}": value
            for name, model in record.models().items()
            for measure, values in model.scores.items()
            for data, value in values.items()
        },
        step,
    )


def score_models(begun: Record, run: Run, state: State, evaluation: PeriodicEvaluation) -> Record:
    """The record with the scores of teacher, student and, where `evaluate.baseline` names one, the no-teacher baseline.

    Several teachers have one entry for their mean, with each of them in its `members`.
    """
    pair, baseline = run.pair, run.baseline
    evaluator, sets = evaluation.evaluator, run.data.sets
    # A baseline only starts from its teacher's layers, and is not compared with it; a teacher with another tokenizer
    # has no score on the student's tokens.
    scored = pair.scored_teachers if begun.teacher else []
    teacher = pair.teacher if scored else None
    entries: dict[str, tuple[Any, Any]] = {"teacher": (begun.teacher, teacher)} if begun.teacher and scored else {}
    for member in scored:
        if begun.teacher and member.name:
            entries[f"teacher {member.name}"] = begun.teacher.members[member.name], member.model
    entries["student"] = begun.student, pair.student
    if baseline is not None:
        model = load_baseline(run.config, pair).to(run.ranks.device)
        entries["baseline"] = model_facts(Model, type(model).__name__, model), model
    best = begun.best
    filled, losses = score_each(entries, evaluation, state.step if best is None or best.step is None else best.step)
    names = [measure.name for measure in evaluator.measures if measure.name not in run.config.evaluate.measures]
    scores = {name: filled["student"].scores.get(name, {}) for name in names}
    refuse_diverged(run, state, scores)
    scored_teacher = filled.get("teacher", begun.teacher)
    if scored_teacher is not None and scored:
        members = {member.name: filled[f"teacher {member.name}"] for member in scored if member.name}
        scored_teacher = scored_teacher.changed(members=members)
    agrees = teacher is not None and pair.kind.vocabulary
    agreement = evaluator.agree(pair.student, teacher, sets) if agrees else None
    scored_baseline = None
    if baseline is not None:
        scored_baseline = baseline.beside(
            filled["baseline"],
            run.config.evaluate.baseline,
            compare_with_baseline(losses, evaluation),
            gap_closed(filled, losses, evaluation),
        )
    return begun.changed(
        teacher=scored_teacher,
        student=filled["student"],
        baseline=scored_baseline,
        agreement=None if agreement is None else {name: Agreement(**entry) for name, entry in agreement.items()},
        samples=draw_samples(run, {name: model for name, (_, model) in entries.items()}, evaluator),
        evaluation={data.name: EvaluationSet(**evaluator.describe(data), digest=digest_of(data)) for data in sets},
    )


def draw_samples(run: Run, models: Mapping[str, Any], evaluator: Evaluator) -> Samples | None:
    """How teacher, student and baseline continue the same beginnings of the first set; all ranks call it.

    None where there are none, and on ranks other than 0.

    Args:
        models: by what they are called; members of several teachers, which are among them, write none.
    """
    sets, count = run.data.sets, run.config.evaluate.num_samples(run.pair.kind.causal)
    if not count or not sets or not run.pair.trained_head:
        return None
    max_tokens = num_new_tokens(sets[0].sequences.shape[1])
    prompts = choose_prompts(sets[0], count, causal_format(run.pair.tokenizer))
    if not prompts or not max_tokens:
        return None
    models = {name: model for name, model in models.items() if name in ("teacher", "student", "baseline")}
    written = continue_with_each(models, prompts, evaluator, max_tokens)
    if not written:
        return None
    tokenizer = run.pair.tokenizer
    texts = [
        Sample(
            prompt=text_of(prompt, tokenizer),
            continuations={name: text_of(of[number], tokenizer) for name, of in written.items()},
        )
        for number, prompt in enumerate(prompts)
    ]
    return Samples(data=sets[0].name, temperature=TEMPERATURE, max_tokens=max_tokens, texts=texts)


def score_each(
    entries: dict[str, tuple[Any, Any]], evaluation: PeriodicEvaluation, step: int
) -> tuple[dict[str, Any], dict[str, ModelLosses]]:
    """Each model's part of the record with its scores and speed, and its losses by sequence where they are compared.

    Args:
        entries: by what the model is called, its part of the record without scores, and the model.
        step: after which the student was what it is now.
    """
    sets = evaluation.run.data.sets
    models = [model for _, model in entries.values()]
    speeds: Sequence[float | None] = [None] * len(models)
    if sets:
        speeds = tokens_per_second(evaluation.evaluator, models, sets[0])
    filled: dict[str, Any] = {}
    losses: dict[str, ModelLosses] = {}
    for (label, (facts, model)), speed in zip(entries.items(), speeds, strict=True):
        keep = label if label in ("teacher", "student") else None  # whose agreement is measured
        known = evaluation.scores_at(step) if label == "student" else None
        scores, by_sequence = known or evaluation.score(model, label, sets, keep)
        losses[label] = by_sequence or {}
        filled[label] = facts.changed(scores=scores, tokens_per_second=speed)
    return filled, losses


def compare_with_baseline(
    losses: dict[str, ModelLosses], evaluation: PeriodicEvaluation
) -> dict[str, dict[str, Resampled]]:
    """The paired bootstrap of student and baseline, by measure and set."""
    by_measure = compare_models(
        losses["student"], losses["baseline"], evaluation.run.data.sets, evaluation.evaluator.scoring
    )
    return {
        measure: {name: Resampled(**asdict(bootstrap)) for name, bootstrap in by_set.items()}
        for measure, by_set in by_measure.items()
    }


def gap_closed(
    models: dict[str, Model], losses: dict[str, ModelLosses], evaluation: PeriodicEvaluation
) -> dict[str, dict[str, GapClosed]]:
    """The fraction of the gap that the student closes, by every measure and set with a score of all three models.

    Measures without losses by sequence have no interval.

    Args:
        models: `teacher`, where it is scored, `student` and `baseline`, each with its scores; others do not count.
        losses: of the same by sequence.
    """
    if "teacher" not in models:
        return {}
    three = {name: models[name] for name in ("teacher", "student", "baseline")}
    evaluator, sets = evaluation.evaluator, evaluation.run.data.sets
    intervals = compare_gaps(losses["student"], losses["baseline"], losses["teacher"], sets, evaluator.scoring)
    closed: dict[str, dict[str, GapClosed]] = {}
    for measure in evaluator.measures:
        for data in sets:
            values = {name: model.score(measure.name, data.name) for name, model in three.items()}
            scores = {name: value for name, value in values.items() if value is not None and math.isfinite(value)}
            if len(scores) < len(three):
                continue
            fraction = fraction_closed(scores, measure.name, measure.lower_is_better)
            drawn = intervals.get(measure.name, {}).get(data.name) if fraction is not None else None
            interval = GapClosed(fraction=fraction, **({} if drawn is None else asdict(drawn)))
            closed.setdefault(measure.name, {})[data.name] = interval
    return closed
