"""One job from settings to report, each part built in reading order."""

import logging
import os
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from distill import backends, optim, profiling
from distill.backends import Backend
from distill.backends.rank import EVENT
from distill.checkpoint import State
from distill.checks import check
from distill.config import Config
from distill.data.batches import Batches
from distill.divergence import ruined_scores, weights_are_finite
from distill.errors import Diverged, SettingError, first_line
from distill.evaluation.evaluator import Evaluator
from distill.export.folder import export
from distill.identity import run_identity
from distill.jsonl import read_lines
from distill.memory import require_memory_for_step
from distill.milestones import Milestones, check_within
from distill.monitor import Monitor
from distill.objective.build import build_objective, make_terms
from distill.objective.objective import Objective
from distill.objective.terms import Term
from distill.objective.vocabulary_parallel import sliced_loss
from distill.pair import Models, load_models, load_twin
from distill.progress import configure_logging
from distill.rank_identity import refuse_differing_settings
from distill.redaction import redacted
from distill.report import report, results, summary
from distill.report.use import origin_of
from distill.run_folder import RunFolder
from distill.schedule import Schedule, length_in_steps, make_schedule, total_steps
from distill.setup import choose_precision, setup_student
from distill.sharding.shard import plain_class
from distill.storage import storage_failure
from distill.tasks import Prepared, Task, find_task
from distill.teacher.cache import Cache
from distill.teacher.members import title_of
from distill.teachers import find_caches, make_teachers, setup_teachers
from distill.train import TRIAL, Training, saved_when_a_rank_is_lost, train

OTHER_TOKENIZER = (
    "The teacher reads with another tokenizer than the student, so it has no scores on the student's tokens."
)

logger = logging.getLogger(__name__)


def run(config: Config, path: Path, recipe: str, command: str, resolved: str) -> dict[str, Any]:
    """Train, evaluate and report as `config` says; the outcome lies in the folder `path`.

    Args:
        recipe, command, resolved: name of the recipe, the command line and the resolved configuration, for the report.

    Returns:
        The content of results.json; of a run that ends with its profile (`profile.stop_after`) the beginning of it.

    Raises:
        SettingError: bad input, before any earlier work in the folder is touched.
        Diverged, Interrupted: training ended early with a usable last checkpoint.
    """
    check(config)
    transformers_logging.disable_progress_bar()  # its bars would garble the progress line
    twin = results.read(Path(config.evaluate.twin), "evaluate.twin") if config.evaluate.twin else None
    with ExitStack() as held:
        backend = join_ranks(config, held)
        terms = make_terms(config.objective)
        task = choose_task(config, terms)
        models = load_models(config, terms, task, backend)
        text = task.prepare(config, models.tokenizer, backend)
        steps = num_steps(config, text.batches)
        schedule = choose_schedule(config, text.batches)
        identity = run_identity(config, {**models.digests, "corpus": text.tokens.digest}, text.batches, steps)
        folder = held.enter_context(RunFolder(path, config.resume, identity, config.train.keep, backend))
        if (finished := folder.finished(steps, config.train.length)) is not None:
            logger.info(f"This run is finished and nothing was changed: {path / 'report.html'}")
            return finished

        config.precision = choose_precision(config.precision, folder.recorded_precision(), backend)
        folder.checkpoints.precision = asdict(config.precision)
        objective = make_objective(config, terms, text.batches, steps, len(models.tokenizer), backend)
        origin = cache_origin(config, models.tokenizer, text, objective)
        caches = find_caches(config, models.digests, origin, text.batches, objective)
        require_memory_for_step(models.student, config.precision.student, *text.batches.shape, backend)
        trainable = setup_student(models.student, objective, config.precision, backend)
        frozen = setup_teachers(config, models.teachers if objective.needs_teacher else [], backend)
        optimizer = optim.build(trainable, config.optimizer)
        state = folder.begin(trainable, optimizer, resolved)
        notes = [*results.notes(config, text.tokens), *text.left_out, *[OTHER_TOKENIZER] * bool(models.tokenizers)]
        announce(config, recipe, models, text, objective, notes, state)
        teacher = make_teachers(config, frozen, caches, text.batches, objective, backend, models.tokenizers)
        notes += [results.cache_note(cache.facts(), name) for name, cache in caches.items()]
        evaluator = make_evaluator(config, task, models, text, backend)
        monitor = Monitor(config, folder, recipe, backend, models.student, evaluator, text.sets, steps, state)
        held.callback(monitor.progress.close)  # also where the training ends early
        facts: dict[str, Any] = {"recipe": recipe, "command": command, "notes": notes, "identity": identity}
        training = Training(
            trainable, teacher, text.batches, objective, optimizer, backend, state, config.train,
            schedule, config.optimizer, folder.checkpoints, monitor, monitor.points,
            make_milestones(config, folder, facts, models, text, objective, backend),
        )  # fmt: skip
        ending = train_profiled(config, training, monitor, facts)
        if ending["ended_by"] == TRIAL:
            return facts
        content = redacted(facts | results_of(config, models, text, training, ending, monitor, twin, caches))
        write_outputs(folder, content, models, resolved, backend)
        backend.barrier()
        return content


def join_ranks(config: Config, held: ExitStack) -> Backend:
    """The ranks of the run, which have the same settings; of them rank 0 alone speaks."""
    backend = held.enter_context(backends.build(config.backend))
    configure_logging(backend.rank)
    refuse_differing_settings(config.given, backend)
    return backend


def choose_task(config: Config, terms: dict[str, Term]) -> Task:
    """What is predicted; of labelled examples it knows the classes, which decide what models are loaded."""
    task = find_task(config.objective.task, terms.values())
    task.read(config)
    return task


def choose_schedule(config: Config, batches: Batches) -> Schedule:
    """The schedule of a run over these batches. Raises SettingError where it does not fit the run's length."""
    steps = length_in_steps(config.train, batches.steps_per_epoch)
    return make_schedule(config.schedule, steps, optim.peak_lr(config.optimizer, batches.rows_per_step))


def num_steps(config: Config, batches: Batches) -> int:
    """The steps of the run, wall-clock aside. Raises SettingError for milestones beyond them."""
    steps = total_steps(config.train, batches.steps_per_epoch)
    check_within(config.train, steps)
    return steps


def make_objective(
    config: Config, terms: dict[str, Term], batches: Batches, steps: int, vocab: int, backend: Backend
) -> Objective:
    """The objective of a run of so many steps."""
    num_positions = steps * batches.rows_per_step * batches.rows.shape[1]
    objective = build_objective(terms, config.objective, config.precision, vocab, num_positions, backend.device)
    if backend.vocabulary_group is not None:
        if objective.plain:
            raise SettingError(
                f"backend.vocabulary_parallel={config.backend.vocabulary_parallel} with a plain objective, which needs "
                "all logits: set objective.kernel=auto and precision.kernels=auto"
            )
        objective.visit = partial(sliced_loss, group=backend.vocabulary_group)
    return objective


def cache_origin(
    config: Config, tokenizer: PreTrainedTokenizerBase, text: Prepared, objective: Objective
) -> dict[str, Any]:
    """Everything besides the teacher that decides what a teacher cache holds; what it was computed on is left out."""
    return {
        "tokens": text.tokens.digest,
        "masks": text.batches.collator.identity,
        "seed": config.seed,
        "soft_positions": "all" if objective.visits_all_rows else "masked",
        "temperature": objective.top_k_temperature,
        "vocabulary": len(tokenizer),
    }


def make_evaluator(config: Config, task: Task, models: Models, text: Prepared, backend: Backend) -> Evaluator:
    """What scores models, by the measures of the task; it has shown that there is memory for it."""
    scoring = task.scoring(config, models.tokenizer, text, backend)
    measures = task.measures(scoring, config.evaluate, models.tokenizer, text.sets)
    evaluator = Evaluator(config.evaluate, scoring, measures, config.precision)
    scored = [] if models.tokenizers else [member.model for member in models.teachers]
    evaluator.rehearse([models.student, *scored], text.sets)
    return evaluator


def announce(
    config: Config, recipe: str, models: Models, text: Prepared, objective: Objective, notes: list[str], state: State
) -> None:
    """Say what is about to be trained, on what, and from where."""
    shown = {" ".join(filter(None, ["teacher", member.name])): member.model for member in models.teachers}
    shown["student"] = models.student
    logger.info(results.banner(config, recipe, text.tokens, text.batches, shown, title_of(models.teachers), notes))
    if state.step:
        logger.info(f"  resuming after step {state.step:,}")
    if event := os.environ.get(EVENT):
        ranks = f"{text.batches.size} rank{'s' * (text.batches.size > 1)}"
        logger.info(f"  {event}; going on with {ranks} from step {state.step:,}")
    if compiled := ["the objective"] * objective.compiled + ["both models"] * config.precision.compile:
        logger.info(f"  the first step compiles {' and '.join(compiled)}, which can take a minute")


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
    student["origin"] = origin_block(config, models)
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
            "notes": [note, *known["notes"]],
            "training": results.training_block(state, text.batches, [], []),
            "backend": results.backend_block(backend, config, state, text.batches),
        }
        whole = models.whole_student(backend)
        if folder.writes:
            path.parent.mkdir(parents=True, exist_ok=True)
            export(whole, models.tokenizer, path, report.model_card(content), durable=True)

    wanted = frozenset(config.train.milestones or [])

    def exists(path: Path) -> bool:
        there: bool = backend.broadcast(path.exists()) if folder.checkpoints.by_all_ranks else path.exists()
        return there

    return Milestones(folder.milestones_path, wanted, config.train.milestone_every, write, exists)


def train_profiled(config: Config, training: Training, monitor: Monitor, facts: dict[str, Any]) -> dict[str, Any]:
    """Train, and say what ended it, and the limits that it had; `facts` gets where the time went."""
    batches, backend, path = training.batches, training.backend, monitor.folder.path
    with saved_when_a_rank_is_lost(training), profiling.recorder(config, path, batches, backend) as training.profile:
        ending = {"ended_by": train(training), "length": config.train.length}
    monitor.close()
    facts["profile"] = profiling.gathered(training.profile, config, batches, backend, facts["identity"])
    return ending


def origin_block(config: Config, models: Models) -> dict[str, Any]:
    """Where the student's class comes from, for its model card."""
    made_by = config.student.custom.path if config.student.custom is not None else None
    return origin_of(models.student, made_by, models.kind.causal)._asdict()


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
        "training": results.training_block(training.state, text.batches, monitor.history(), metrics) | ending,
        "precision": asdict(config.precision),
        "backend": results.backend_block(training.backend, config, training.state, text.batches),
        "environment": results.environment(training.backend.device),
        "history_by": "epoch" if monitor.points.every_steps is None else "step",
        "history": monitor.history(),
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
    for (label, (name, model)), speed in zip(named.items(), speeds, strict=True):
        known = monitor.last_scores() if label == "student" else None
        blocks[label] = results.model_block(name, model, known or evaluator.score(model, label, sets), speed)
    refuse_ruined(training, models, {name: blocks["student"].get(name, {}) for name in measured})
    blocks["student"]["origin"] = origin_block(config, models)
    if teachers and not scored:
        blocks["teacher"] = results.model_block(title_of(teachers), models.teacher, {}, None)
    if members:
        blocks["teacher"]["members"] = {member.name: blocks.pop(label) for label, member in members.items()}
    if twin is not None:
        steps, history = twin["training"]["steps"], twin["history"]
        blocks["twin"] |= {"folder": config.evaluate.twin, "steps": steps, "history": history}
        blocks["twin"]["objective"] = twin.get("objective")
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
    export(student, models.tokenizer, path / "student", report.model_card(content))
    written = f"Report: {path / 'report.html'}"
    try:
        report.write(path, content, read_lines(folder.metrics_path), resolved)
    except Exception as error:  # the student is there, and the report can be made at any time
        failure = storage_failure(error) or f"{type(error).__name__}: {first_line(error)}"
        written = f"No report ({failure}): `python -m distill.report {path}` writes it."
    folder.write_results(content)
    logger.info(f"{summary.findings(content)}\n{written}   Student: {path / 'student'}")
