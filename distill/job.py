"""One job from settings to report, each part built in reading order."""

import logging
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from distill import distributed as backends
from distill.config.settings import Config
from distill.data.batches import Batches
from distill.distributed import Backend, gradient_sync
from distill.distributed.rank_identity import refuse_differing_settings
from distill.distributed.thread_choice import keep_threads
from distill.evaluation.evaluator import Evaluator
from distill.evaluation.memory_check import check_memory
from distill.models.language_model import LanguageModel
from distill.models.memory import require_memory_for_step
from distill.monitor import Monitor
from distill.objective.build import build_objective, make_terms
from distill.objective.objective import Objective
from distill.objective.terms import Term
from distill.objective.trainable import Trainable
from distill.optim import updates as optim
from distill.optim.schedule import Schedule, length_in_steps, make_schedule, total_steps
from distill.outcome import finished_record, make_milestones, write_outputs
from distill.report.comparison.goal import Goal
from distill.report.live_run import RunPage
from distill.runs import profiling
from distill.runs.banner import banner, notes
from distill.runs.check import check
from distill.runs.checkpoint import State
from distill.runs.curve import Curve
from distill.runs.describe import describe
from distill.runs.identity import run_identity
from distill.runs.metrics import Metrics
from distill.runs.milestones import check_within
from distill.runs.pair import Models, load_models, settle_start
from distill.runs.record import Record
from distill.runs.run_folder import RunFolder
from distill.runs.setup import choose_precision, setup_student
from distill.runs.step import Observer
from distill.runs.teachers import find_caches, make_teachers, setup_teachers
from distill.runtime.progress import configure_logging
from distill.tasks import Prepared, Task, find_task
from distill.teacher.cache import Cache
from distill.teacher.members import title_of
from distill.train import TRIAL, Learner, Training, saved_when_a_rank_is_lost, train
from distill.twin import BaselineRun, find_twin, settled_twin

OTHER_TOKENIZER = (
    "The teacher reads with another tokenizer than the student, so it has no scores on the student's tokens."
)

logger = logging.getLogger(__name__)


def run(config: Config, path: Path, recipe: str, command: str, resolved: str) -> Record:
    """Train, evaluate and report as `config` says; the outcome lies in the folder `path`.

    Args:
        recipe, command, resolved: name of the recipe, the command line and the resolved configuration, for the report.

    Returns:
        The record; of a run that ends with its profile (`profile.stop_after`) one that is not finished.

    Raises:
        SettingError: bad input, before any earlier work in the folder is touched.
        Diverged, Interrupted: training ended early with a usable last checkpoint.
    """
    check(config)
    with ExitStack() as held:
        backend = join_ranks(config, held)
        page = held.enter_context(RunPage(config, path, recipe, command, backend))
        terms = make_terms(config.objective)
        task = choose_task(config, terms)
        models = load_models(config, terms, task, backend)
        text = task.prepare(config, models.tokenizer, backend)
        steps = num_steps(config, text.batches)
        schedule = choose_schedule(config, text.batches)
        identity = run_identity(config, {**models.digests, "corpus": text.tokens.digest}, text.batches, steps)
        twin = find_twin(config, identity, steps, terms)
        folder = held.enter_context(RunFolder(path, config.resume, identity, config.train.keep, backend))
        if (finished := folder.finished(steps, config.train.length)) is not None:
            logger.info(f"This run is finished and nothing was changed: {path / 'report.html'}")
            return finished

        config = settle_formats(config, folder)
        config = settle_start(config, models, task, text.batches, folder)
        twin = settled_twin(twin, config)
        objective = make_objective(config, terms, text.batches, steps, len(models.tokenizer), backend)
        caches = choose_caches(config, models, text, objective)
        require_memory_for_step(models.student, config.precision.student, *text.batches.shape, backend)
        trainable, frozen = setup_models(config, models, objective, backend)
        sync = gradient_sync(backend, trainable)
        optimizer = optim.build(trainable, config.optimizer)
        state = folder.begin(trainable, optimizer, resolved)
        page.begin(state.step, state.seconds, steps)
        notes = make_notes(config, recipe, models, text, objective, twin)
        announce(config, recipe, models, text, objective, notes, state)
        teacher = make_teachers(config, frozen, caches, text.batches, objective, backend, models.tokenizers)
        evaluator = make_evaluator(config, task, models, text, objective, backend)
        known = describe(config, models, caches, text, objective, evaluator.measures, backend)
        record = replace(known, recipe=recipe, command=command, identity=identity, notes=notes + known.notes)
        page.describe(record)
        monitor = make_monitor(config, folder, recipe, models, text, evaluator, objective, steps, state, page)
        held.callback(monitor.progress.close)  # also where the training ends early
        learner = Learner(trainable, sync, optimizer, schedule, config.optimizer)
        training = Training(learner, teacher, text.batches, backend, config.train, state, folder.checkpoints)
        metrics = Metrics(objective, text.batches, config.train.log_every, monitor, state)
        milestones = make_milestones(config, folder, record, models, text, backend)
        observers = (metrics, monitor.curve, milestones)
        record = train_profiled(config, training, objective, observers, monitor, record)
        if record.training.ended_by == TRIAL:
            return record
        done = finished_record(record, config, models, text, training, monitor, milestones, twin)
        return publish(done, models, monitor, resolved)


def join_ranks(config: Config, held: ExitStack) -> Backend:
    """The ranks of the run, which have the same settings; of them rank 0 alone speaks."""
    backend = held.enter_context(backends.build(config.backend))
    configure_logging(backend.rank)
    transformers_logging.disable_progress_bar()  # its bars would garble the progress line
    refuse_differing_settings(config.given, backend)
    return backend


def choose_task(config: Config, terms: dict[str, Term]) -> Task:
    """What is predicted; of labelled examples it knows the classes, which decide what models are loaded."""
    task = find_task(config.objective.task, terms.values())
    task.read(config)
    return task


def settle_formats(config: Config, folder: RunFolder) -> Config:
    """Choose number formats and threads where the settings leave them open; each checkpoint keeps them for a resume.

    Returns:
        The settings with a format in place of every `auto`.
    """
    recorded = folder.recorded_precision()
    precision = choose_precision(config.precision, recorded, folder.backend)
    folder.checkpoints.precision = dict(precision) | keep_threads(config.backend, recorded)
    return config.changed(precision=precision)


def choose_schedule(config: Config, batches: Batches) -> Schedule:
    """The schedule of a run over these batches. Raises SettingError where it does not fit the run's length."""
    steps = length_in_steps(config.train, batches.steps_per_epoch)
    return make_schedule(config.schedule, steps, optim.peak_lr(config.optimizer, batches.rows_per_step))


def num_steps(config: Config, batches: Batches) -> int:
    """The steps of the run, wall-clock aside. Raises SettingError for milestones beyond them."""
    steps = total_steps(config.train, batches.steps_per_epoch)
    check_within(config.train, steps)
    return steps


def setup_models(
    config: Config, models: Models, objective: Objective, backend: Backend
) -> tuple[Trainable, dict[str, LanguageModel]]:
    """What is trained, and the teachers by name, as training runs them."""
    trainable = setup_student(models.student, objective, config.precision, backend)
    frozen = setup_teachers(config, models.teachers if objective.needs_teacher else [], backend)
    return trainable, frozen


def make_objective(
    config: Config, terms: dict[str, Term], batches: Batches, steps: int, vocab: int, backend: Backend
) -> Objective:
    """The objective of a run of so many steps."""
    num_positions = steps * batches.rows_per_step * batches.rows.shape[1]
    return build_objective(terms, config.objective, config.precision, vocab, num_positions, backend.device)


def choose_caches(config: Config, models: Models, text: Prepared, objective: Objective) -> dict[str, Cache]:
    """The caches of teachers that the settings want, by the name of the teacher."""
    origin = cache_origin(config, models.tokenizer, text, objective)
    return find_caches(config, models.digests, origin, text.batches, objective)


def cache_origin(
    config: Config, tokenizer: PreTrainedTokenizerBase, text: Prepared, objective: Objective
) -> dict[str, Any]:
    """Everything besides the teacher that decides what a teacher cache holds; what it was computed on is left out."""
    return {
        "tokens": text.tokens.digest,
        "masks": text.batches.collator.identity,
        "seed": None if find_task(config.objective.task).kind.causal else config.seed,  # it draws masks
        "soft_positions": "all" if objective.visits_all_rows else "masked",
        "temperature": objective.top_k_temperature,
        "vocabulary": len(tokenizer),
    }


def make_evaluator(
    config: Config, task: Task, models: Models, text: Prepared, objective: Objective, backend: Backend
) -> Evaluator:
    """What scores models, by the measures of the task; it has shown that there is memory for it.

    Raises:
        SettingError: `optimize` names a number that the results of this run will not have.
    """
    evaluator = task.evaluator(config, models.tokenizer, text.sets, backend)
    if (goal := Goal.of(config.optimize)) is not None:
        compares = objective.needs_teacher and models.tokenizers is None and models.kind.vocabulary
        goal.check(evaluator.measures, [data.name for data in text.sets], objective.terms, compares)
    scored = [] if models.tokenizers else [member.model for member in models.teachers]
    check_memory(evaluator, [models.student, *scored], text.sets)
    return evaluator


def make_notes(
    config: Config, recipe: str, models: Models, text: Prepared, objective: Objective, twin: BaselineRun | None
) -> list[str]:
    """What the report says besides the numbers, as far as it is known before the first step."""
    other = [OTHER_TOKENIZER] if models.tokenizers and objective.needs_teacher else []
    remarks = twin.remarks if twin else []
    return [*notes(config, recipe, text.tokens, objective.needs_teacher), *text.left_out, *other, *remarks]


def announce(
    config: Config, recipe: str, models: Models, text: Prepared, objective: Objective, notes: list[str], state: State
) -> None:
    """Say what is about to be trained, on what, and from where."""
    shown = {" ".join(filter(None, ["teacher", member.name])): member.model for member in models.teachers}
    shown["student"] = models.student
    teacher = title_of(models.teachers)
    if teacher and not objective.needs_teacher:
        teacher += " (the student does not learn from it)"
    logger.info(banner(config, recipe, text.tokens, text.batches, shown, teacher, notes))
    if state.step:
        logger.info(f"  resuming after step {state.step:,}")
    if compiled := ["the objective"] * objective.compiled + ["both models"] * config.precision.compile:
        logger.info(f"  the first step compiles {' and '.join(compiled)}, which can take a minute")


def make_monitor(
    config: Config,
    folder: RunFolder,
    recipe: str,
    models: Models,
    text: Prepared,
    evaluator: Evaluator,
    objective: Objective,
    steps: int,
    state: State,
    page: RunPage,
) -> Monitor:
    """What follows the training."""
    backend = folder.backend
    comparable = objective.needs_teacher and models.tokenizers is None  # its teacher is scored on the same rows
    pair = models.student, models.teacher if comparable else None
    curve = Curve(config.evaluate.curve, folder, evaluator, pair, text.sets, steps)
    return Monitor(config, folder, recipe, backend, models.student, evaluator, text.sets, steps, state, page, curve)


def train_profiled(
    config: Config,
    training: Training,
    objective: Objective,
    observers: tuple[Observer, ...],
    monitor: Monitor,
    record: Record,
) -> Record:
    """Train; gives the record with what has ended it, and with where the time went."""
    batches, backend, path = training.batches, training.backend, monitor.folder.path
    with saved_when_a_rank_is_lost(training), profiling.recorder(config, path, batches, backend) as recorder:
        monitor.curve.begin(training.state)
        ended_by = train(training, objective, observers, monitor)
    monitor.close()
    profile = profiling.gathered(recorder, config, batches, backend, record.identity)
    return replace(
        record,
        training=replace(record.training, ended_by=ended_by),
        profile=profile,
    )


def publish(record: Record, models: Models, monitor: Monitor, resolved: str) -> Record:
    """Write everything that the run leaves, the report in place of the page of the run; gives the record."""
    record = record.redacted()
    monitor.page.stop()
    write_outputs(monitor.folder, record, models, resolved, monitor.backend)
    monitor.page.published = True  # whatever happens from here on, the report stays
    monitor.backend.barrier()
    return record
