"""What a training leaves: students kept on the way, scores side by side, results.json, the student and its report."""

import logging
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from distill.config.settings import Config
from distill.distributed import Backend
from distill.distributed.shard import plain_class
from distill.evaluation import bootstrap
from distill.models.export_folder import export
from distill.models.layer_choice import AUTO, choose_layers
from distill.monitor import Monitor
from distill.objective.objective import Objective
from distill.report import report, results, summary
from distill.report.model_card import model_card
from distill.report.use import call_of, origin_of
from distill.runs.checkpoint import State
from distill.runs.divergence import ruined_scores, weights_are_finite
from distill.runs.milestones import Milestones
from distill.runs.pair import Models, load_twin
from distill.runs.run_folder import RunFolder
from distill.runtime.errors import Diverged, first_line
from distill.runtime.jsonl import read_lines
from distill.runtime.redaction import redacted
from distill.runtime.storage import storage_failure
from distill.tasks import Prepared
from distill.teacher.cache import Cache
from distill.teacher.members import title_of
from distill.train import Training

logger = logging.getLogger(__name__)


def make_milestones(
    config: Config,
    folder: RunFolder,
    facts: dict[str, Any],
    models: Models,
    text: Prepared,
    objective: Objective,
    backend: Backend,
) -> Milestones:
    """What keeps the student after the steps that the settings name, with a model card of the run so far.

    Args:
        facts: what the card says besides, by the names of results.json.
    """
    student = results.model_block(plain_class(models.student).__name__, models.student, {}, None)
    student |= {"origin": origin_block(config, models), "start": start_block(config, models)}
    teacher = results.model_block(title_of(models.teachers), models.teacher, {}, None) if models.teachers else None
    known = facts | {
        "scale": config.scale,
        "corpus": results.corpus_block(text.tokens, text.batches),
        "student": student,
        "teacher": teacher if objective.needs_teacher else None,
        "environment": results.environment(backend.device),
    }

    def write(path: Path, state: State) -> None:
        note = f"This is the student after step {state.step}; the run went on, and its report has the scores."
        content = known | {
            "milestone": state.step,
            "notes": [note, *known["notes"]],
            "training": results.training_block(state, text.batches, [], []),
            "backend": results.backend_block(backend, config, state, text.batches),
        }
        whole = models.whole_student(backend)
        if folder.writes:
            path.parent.mkdir(parents=True, exist_ok=True)
            export(whole, models.tokenizer, path, model_card(redacted(content)), durable=True)

    wanted = frozenset(config.train.milestones or [])

    def exists(path: Path) -> bool:
        there: bool = backend.broadcast(path.exists()) if folder.checkpoints.by_all_ranks else path.exists()
        return there

    return Milestones(folder.milestones_path, wanted, config.train.milestone_every, write, exists)


def origin_block(config: Config, models: Models) -> dict[str, Any]:
    """Where the student's class comes from, for its model card."""
    if (make := config.student.custom) is None:
        return origin_of(models.student, None, models.kind.causal)._asdict()
    call = call_of(make, config.corpus.tokens.sequence_length)
    return origin_of(models.student, make.path, models.kind.causal, call)._asdict()


def start_block(config: Config, models: Models) -> dict[str, Any]:
    """What the student was before its first step: layers of a teacher, a saved model, or new weights."""
    settings = config.student
    found: dict[str, Any] = {"kind": settings.kind, "from": settings.path}
    if settings.kind == "layers":
        first = models.teachers[0]
        found |= {"from": first.title}
        if settings.layers != AUTO:  # else nobody knows any more
            available = first.model.config.num_hidden_layers
            found |= {"layers": choose_layers(settings.layers, settings.num_layers, available)}
        found |= {"search": models.layer_search} if models.layer_search else {}
    return found


def results_of(
    config: Config,
    models: Models,
    text: Prepared,
    training: Training,
    ending: dict[str, Any],
    monitor: Monitor,
    twin: dict[str, Any] | None,
    caches: dict[str, Cache],
) -> dict[str, Any]:
    """Everything that results.json records of a training that has ended; all ranks score.

    Args:
        ending: what ended it, and the limits that it had.
    """
    compared = compare_models(config, models, training, monitor, twin)
    for name, cache in caches.items():
        block = compared["teacher"]
        (block["members"][name] if name else block)["cache"] = cache.facts()
    metrics = read_lines(monitor.folder.metrics_path)
    return {
        "scale": config.scale,
        "finished": True,
        "corpus": results.corpus_block(text.tokens, text.batches),
        **compared,
        "objective": results.objective_block(training.objective),
        "optimizer": results.optimizer_block(config, text.batches),
        "measures": results.measures_block(monitor.evaluator.measures),
        "training": results.training_block(training.state, text.batches, monitor.history(), metrics)
        | ending
        | {"evaluation_seconds": monitor.evaluator.seconds},
        "precision": asdict(config.precision),
        "backend": results.backend_block(training.backend, config, training.state, text.batches),
        "environment": results.environment(training.backend.device),
        "history_by": "epoch" if monitor.points.every_steps is None else "step",
        "history": monitor.history(),
        "curve": training.curve.found() if training.curve else None,
        "milestones": training.milestones.found() if training.milestones else [],
    }


def compare_models(
    config: Config, models: Models, training: Training, monitor: Monitor, twin: dict[str, Any] | None
) -> dict[str, Any]:
    """Teacher, student and, where `evaluate.twin` names its run, the no-teacher twin, side by side.

    Several teachers stand there as the one that they are together, with each of them in its `members`.
    """
    evaluator, sets = monitor.evaluator, monitor.sets
    # A twin only starts from its teacher's layers, and is not compared with it.
    teachers = models.teachers if training.objective.needs_teacher else []
    # A teacher with a tokenizer of its own has no score on the student's tokens.
    scored = teachers if models.tokenizers is None else []
    teacher = models.teacher if scored else None
    members = {f"teacher {member.name}": member for member in scored if member.name}
    named = {
        "teacher": (title_of(teachers), teacher),
        **{label: (member.title, member.model) for label, member in members.items()},
        "student": (plain_class(models.student).__name__, models.student),
    }
    if twin is not None:
        model = load_twin(config, models).to(training.backend.device)
        named["twin"] = (type(model).__name__, model)
    named = {label: pair for label, pair in named.items() if pair[1] is not None}
    speeds = (
        evaluator.tokens_per_second([model for _, model in named.values()], sets[0]) if sets else [0.0] * len(named)
    )
    blocks: dict[str, Any] = {"teacher": None, "student": None, "twin": None}
    measured = [measure.name for measure in evaluator.measures]
    losses = {}
    for (label, (name, model)), speed in zip(named.items(), speeds, strict=True):
        # What an earlier process scored has left no losses by row, by which the student is compared with its twin.
        lacking = label != "student" or (twin is not None and monitor.row_losses is None)
        known = None if lacking else monitor.last_scores()
        keep = label if label in ("teacher", "student") else None  # whose agreement is measured below
        blocks[label] = results.model_block(name, model, known or evaluator.score(model, label, sets, keep), speed)
        losses[label] = monitor.row_losses if known else dict(evaluator.scoring.row_losses or {})
    refuse_ruined(training, models, {name: blocks["student"].get(name, {}) for name in measured})
    blocks["student"] |= {"origin": origin_block(config, models), "start": start_block(config, models)}
    if teachers and not scored:
        blocks["teacher"] = results.model_block(title_of(teachers), models.teacher, {}, None)
    if members:
        blocks["teacher"]["members"] = {member.name: blocks.pop(label) for label, member in members.items()}
    if twin is not None:
        steps, remarks = (twin.get("training") or {}).get("steps"), twin["remarks"]
        blocks["twin"] |= {"folder": config.evaluate.twin, "steps": steps, "history": twin.get("history") or []}
        blocks["twin"] |= {"curve": twin.get("curve")}
        blocks["twin"] |= {"objective": twin.get("objective"), "remarks": remarks}
        compared = bootstrap.compare_models(losses["student"] or {}, losses["twin"] or {}, sets, evaluator.scoring)
        blocks["twin"]["bootstrap"] = {
            measure: {name: each.as_dict() for name, each in by_set.items()} for measure, by_set in compared.items()
        }
    return {
        **blocks,
        "agreement": evaluator.agree(models.student, teacher, sets)
        if teacher is not None and models.kind.vocabulary
        else None,
        "evaluation": {data.name: evaluator.describe(data) for data in sets},
    }


def refuse_ruined(training: Training, models: Models, scores: dict[str, dict[str, float | None]]) -> None:
    """Raises Diverged where the student's weights or scores are those of a ruined one, so that nothing is published.

    The checkpoints that may be ruined are set aside, so that the same command goes on from one before them.
    """
    ruined = ruined_scores(scores, len(models.tokenizer), training.settings.max_loss_ratio)
    finite = weights_are_finite(dict(models.student.named_parameters()))
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


def write_outputs(folder: RunFolder, content: dict[str, Any], models: Models, resolved: str, backend: Backend) -> None:
    """Write student, report and, last of all, results.json, which makes the run a finished one; rank 0 does."""
    student = models.whole_student(backend)
    if not folder.writes:
        return
    path = folder.path
    export(student, models.tokenizer, path / "student", model_card(content))
    written = f"Report: {path / 'report.html'}"
    try:
        report.write(path, content, read_lines(folder.metrics_path), resolved)
    except Exception as error:  # the student is there, and the report can be made at any time
        failure = storage_failure(error) or f"{type(error).__name__}: {first_line(error)}"
        written = f"No report ({failure}): `distill report run={path}` writes it."
    folder.write_results(content)
    logger.info(f"{summary.findings(content)}\n{written}   Student: {path / 'student'}")
