"""What a training has come to: teacher, student and baseline scored side by side, for the record of the run."""

import math
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from distill.data.sequence_format import causal_format
from distill.evaluation.conclusion import UNCLEAR
from distill.evaluation.evaluator import Evaluator
from distill.evaluation.samples import TEMPERATURE, choose_prompts, continue_with_each, num_new_tokens, text_of
from distill.evaluation.significance import ModelLosses, compare_gaps, compare_models
from distill.evaluation.speed import tokens_per_second
from distill.runs import facts
from distill.runs.baseline import doubt
from distill.runs.callbacks import kept_snapshots
from distill.runs.describe import data_wait, size_of, training_facts
from distill.runs.divergence import refuse_diverged
from distill.runs.facts import Baseline, GapClosed, HistoryPoint, Model, Sample, Samples, fraction_closed
from distill.runs.identity import digest_of
from distill.runs.on_policy import written
from distill.runs.pair import load_baseline
from distill.runs.periodic_evaluation import PeriodicEvaluation
from distill.runs.record import MODELS, Record
from distill.runs.run import Run
from distill.runs.state import State
from distill.runtime.jsonl import read_lines

Losses = dict[str, ModelLosses]  # by the name of the model


def complete_record(begun: Record, run: Run, state: State, evaluation: PeriodicEvaluation) -> Record:
    """The record of a training that has ended; all ranks score.

    Args:
        begun: the record of the run as it began, with its profile where it has one, and what has ended it.
    """
    lines, logged = evaluation.lines(), read_lines(run.folder.metrics_path)
    trained = training_facts(state, run.data.batches, lines)  # without the seconds of what is scored now
    scored = score_models(begun, run, state, evaluation)
    # In the course of the training the student alone has scores, perhaps of a part of the sets.
    scores = {
        f"{name}/{measure}/{data}": value
        for name, model in scored.models().items()
        for measure, values in model.scores.items()
        for data, value in values.items()
    }
    evaluation.tracker.log_metrics(scores, state.step)
    return scored.changed(
        finished=True,
        training=trained.changed(
            data_wait=data_wait(logged),
            written=next((each for each in map(written, reversed(logged)) if each), {}),
            ended_by=begun.training.ended_by,
            length=run.config.train.length,
            evaluation_seconds=evaluation.evaluator.readers.seconds,
            scored_sequences=run.scored_on_the_way,
        ),
        history=[HistoryPoint.model_validate(line) for line in lines],
        snapshots=kept_snapshots(run.folder.snapshots_path),
    )


def score_models(begun: Record, run: Run, state: State, evaluation: PeriodicEvaluation) -> Record:
    """The record with the scores of teacher, student and, where `evaluate.baseline` names one, the no-teacher baseline.

    Several teachers have one entry for their mean, if `Pair.teacher` is one, with each of them in its `members`.
    """
    pair, evaluator, sets = run.pair, evaluation.evaluator, run.data.sets
    # A baseline only starts from its teacher's layers, and is not compared with it; a teacher with another tokenizer
    # has no score on the student's tokens.
    teachers = pair.scored_teachers if begun.teacher else []
    together = pair.teacher if teachers else None
    models: dict[str, Any] = {} if together is None else {"teacher": together}
    models |= {f"teacher {member.name}": member.model for member in teachers if member.name}
    models["student"] = pair.student
    if run.baseline is not None:
        models["baseline"] = load_baseline(run.config, pair).to(run.ranks.device)
    best = begun.best
    scored, losses = score_each(models, evaluation, state.step if best is None or best.step is None else best.step)
    student, teacher, baseline = begun.student.changed(**scored["student"]), begun.teacher, run.baseline
    of_task = [measure.name for measure in evaluator.measures if measure.name not in run.config.evaluate.measures]
    refuse_diverged(run, state, {name: student.scores.get(name, {}) for name in of_task})
    if teacher is not None and teachers:
        members = {name: part.changed(**scored.get(f"teacher {name}", {})) for name, part in teacher.members.items()}
        teacher = teacher.changed(**scored.get("teacher", {}), members=members)
    agreement = None
    if together is not None and pair.kind.vocabulary:
        agrees = evaluator.agree(pair.student, together, sets)
        agreement = {name: facts.Agreement(**of_set) for name, of_set in agrees.items()}
    if baseline is not None:
        model = models["baseline"]
        baseline = baseline.changed(name=type(model).__name__, **size_of(model), **scored["baseline"])
        parts = {"student": student, "baseline": baseline}
        parts |= {"teacher": teacher} if teacher and "teacher" in models else {}
        baseline = compare_with_baseline(baseline, parts, losses, evaluation, state.step)
    return begun.changed(
        teacher=teacher,
        student=student,
        baseline=baseline,
        agreement=agreement,
        samples=draw_samples(run, {name: models[name] for name in MODELS if name in models}, evaluator),
        evaluation={
            data.name: facts.EvaluationSet(**evaluator.describe(data), digest=digest_of(data)) for data in sets
        },
    )


def draw_samples(run: Run, models: Mapping[str, Any], evaluator: Evaluator) -> Samples | None:
    """How teacher, student and baseline continue the same beginnings of the first set; all ranks call it.

    None where there are none, and on ranks other than 0.
    """
    sets, tokenizer, count = run.data.sets, run.pair.tokenizer, run.config.evaluate.num_samples(run.pair.kind.causal)
    if not count or not sets or not run.pair.trained_head:
        return None
    max_tokens = num_new_tokens(sets[0].sequences.shape[1])
    prompts = choose_prompts(sets[0], count, causal_format(tokenizer))
    if not prompts or not max_tokens:
        return None
    written = continue_with_each(models, prompts, evaluator, max_tokens)
    if not written:
        return None
    texts = [
        Sample(
            prompt=text_of(prompt, tokenizer),
            continuations={name: text_of(of[number], tokenizer) for name, of in written.items()},
        )
        for number, prompt in enumerate(prompts)
    ]
    return Samples(data=sets[0].name, temperature=TEMPERATURE, max_tokens=max_tokens, texts=texts)


def score_each(
    models: dict[str, Any], evaluation: PeriodicEvaluation, step: int
) -> tuple[dict[str, dict[str, Any]], Losses]:
    """Each model's scores and speed, as its part of the record has them, and its losses by sequence if they are read.

    Args:
        step: after which the student was what it is now.
    """
    sets = evaluation.run.data.sets
    speeds = tokens_per_second(evaluation.evaluator, [*models.values()], sets[0]) if sets else [None] * len(models)
    scored, losses = dict[str, dict[str, Any]](), Losses()
    for (name, model), speed in zip(models.items(), speeds, strict=True):
        known = evaluation.scores_at(step) if name == "student" else None
        scores, losses[name] = known or evaluation.evaluator.score_by_sequence(model, name, sets)
        scored[name] = {"tokens_per_second": speed, **scores}
    return scored, losses


def compare_with_baseline(
    baseline: Baseline, models: dict[str, Model], losses: Losses, evaluation: PeriodicEvaluation, steps: int
) -> Baseline:
    """The baseline with the conclusions on the teacher, and the fraction of the gap that the student closes.

    The latter is for every measure and set with a score of all three models; without losses by sequence it has no
    interval.

    Args:
        models: `teacher`, where it is scored, `student` and `baseline`, each with its scores.
        losses: of the same by sequence.
        steps: that the student was trained for.
    """
    evaluator, sets = evaluation.evaluator, evaluation.run.data.sets
    doubted = doubt(baseline, models["student"], steps)
    conclusions = {
        measure: {
            name: facts.Conclusion.model_validate(
                replace(one, word=UNCLEAR, reason=f"{doubted}; {one.reason}") if doubted else one
            )
            for name, one in by_set.items()
        }
        for measure, by_set in compare_models(losses["student"], losses["baseline"], sets, evaluator.scoring).items()
    }
    closed: dict[str, dict[str, GapClosed]] = {}
    if "teacher" in models:
        gaps = compare_gaps(losses["student"], losses["baseline"], losses["teacher"], sets, evaluator.scoring)
        for measure in evaluator.measures:
            for data in sets:
                values = {name: model.score(measure.name, data.name) for name, model in models.items()}
                scores = {name: value for name, value in values.items() if value is not None and math.isfinite(value)}
                if len(scores) < len(models):
                    continue
                fraction = fraction_closed(scores, measure.name, measure.lower_is_better)
                gap = gaps.get(measure.name, {}).get(data.name) if fraction is not None else None
                of_gap = GapClosed(fraction=fraction, **({} if gap is None else asdict(gap)))
                closed.setdefault(measure.name, {})[data.name] = of_gap
    return baseline.changed(conclusions=conclusions, gap_closed=closed)
