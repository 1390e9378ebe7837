"""One job from settings to report, each part built in reading order."""

import logging
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

from transformers.utils import logging as transformers_logging

from distill.config.settings import Config
from distill.data.batches import Batches
from distill.distributed import Ranks, gradient_sync, join_ranks
from distill.distributed.rank_identity import refuse_differing_ranks, refuse_differing_settings
from distill.distributed.thread_choice import keep_threads
from distill.evaluation.evaluator import Evaluator
from distill.evaluation.memory_check import check_memory
from distill.models.layer_choice import AUTO
from distill.models.memory import require_memory_for_step
from distill.objective.build import build_objective, check_losses, make_terms
from distill.objective.objective import Objective
from distill.objective.terms import Term
from distill.objective.trainable import Trainable
from distill.optim import updates as optim
from distill.optim.schedule import ENDLESS, Schedule, length_in_steps, make_schedule, total_steps
from distill.report.comparison.columns import Goal, choose_best
from distill.report.live import RunPage
from distill.report.publish import make_snapshots, write_outputs
from distill.runs import profiling, trackers
from distill.runs.banner import announce, notes_of
from distill.runs.baseline import check_baseline_settings, find_baseline
from distill.runs.callbacks import RunLog, UserObservers, check_snapshots, make_observers
from distill.runs.check import check
from distill.runs.describe import describe
from distill.runs.facts import Best
from distill.runs.identity import Identity, run_identity, set_digests
from distill.runs.outcome import complete_record
from distill.runs.pair import Pair, RunModels, load_models, resolve_layers
from distill.runs.periodic_evaluation import PeriodicEvaluation, check_best
from distill.runs.record import Record
from distill.runs.run import Run
from distill.runs.run_folder import RunFolder
from distill.runs.setup import choose_precision, setup_student
from distill.runs.state import State
from distill.runs.step import Callback
from distill.runs.teachers import find_caches, make_teachers, setup_teachers
from distill.runs.term_losses import loss_evaluator
from distill.runs.tokenizers import refuse_tokens_beyond
from distill.runtime.progress import configure_logging
from distill.tasks import Prepared, Task, find_task
from distill.teacher.cache import Cache
from distill.train import TRIAL, Learner, Training, saved_when_a_rank_is_lost, train

LONG_MINUTES = 10.0  # of a run that is worth the start of a compiler, whatever its steps

logger = logging.getLogger(__name__)


def run_job(config: Config, path: Path, recipe: str, command: str, resolved: str) -> Record:
    """Train, evaluate and report by these settings; the outcome is in the folder `path`.

    Args:
        recipe, command, resolved: name of the recipe, the command line and the resolved configuration, for the report.

    Returns:
        The record; of a run that ends with its profile (`profile.stop_after`) one that is not finished.

    Raises:
        SettingError: bad input, before any earlier work in the folder is touched.
        Diverged, Interrupted: training ended early with a usable last checkpoint.
    """
    check(config, path)
    with ExitStack() as stack:
        # Load models and data, and open the folder of the run that they make.
        ranks = enter_ranks(config, stack)
        page = stack.enter_context(make_page(config, path, recipe, command, ranks))
        terms = make_terms(config.objective)
        task = choose_task(config, terms)
        models = load_models(config, terms, task, ranks)  # teachers, tokenizers, student
        data = task.prepare(config, models.tokenizer, ranks)  # training sequences in their order, evaluation sets
        steps, schedule = num_steps(config, data.batches), choose_schedule(config, data.batches)
        identity = identity_of(config, models, data, steps, ranks)
        baseline = find_baseline(config, identity, steps, terms)
        folder = stack.enter_context(RunFolder(path, config.resume, identity, config.train.keep, ranks))
        if (finished := folder.load_finished_record(steps, config.train.length)) is not None:
            return folder.leave_finished(finished, resolved)
        # Resolve what the settings leave open: from here on no setting is `auto`.
        config, formats = resolve_precision(config, folder)
        config, pair = resolve_layers(config, models, task, data.batches, folder)
        baseline = check_baseline_settings(baseline, config)
        objective = make_objective(config, pair.terms, data.batches, steps, pair.vocabulary, ranks)
        run = Run(config, task, pair, data, objective, folder, ranks)
        # Build everything that trains. Whatever may refuse the run comes before `folder.begin`: so far no file changes.
        caches = choose_caches(run, models.digests)
        learner = make_learner(run, schedule)
        frozen = setup_teachers(config, pair.teachers if objective.needs_teacher else [], caches, ranks)
        state = folder.load(learner.model, learner.optimizer)
        evaluator = make_evaluator(run)
        best = choose_best(config.train, evaluator.measures, [one.name for one in data.sets])
        observers = make_observers(config.own_observers, path, ranks)
        page.begin(state.seconds, None if steps == ENDLESS else steps)
        notes = notes_of(config, pair, data, objective) + (baseline.remarks if baseline else [])
        announce(config, recipe, pair, data, objective, notes, state)
        teacher = make_teachers(config, frozen, caches, data.batches, objective, ranks, pair.tokenizers)
        record = describe_once(run, caches, evaluator, recipe, command, notes).changed(best=best)
        tracker = trackers.open_on_rank_0(config.tracker, path, config.written, path.name, ranks)
        folder.begin(state, resolved, found_layers(config, models, pair))
        page.describe(record)
        # Train.
        folder.checkpoints.begin(formats, best, folder.beginning())
        learning = (learner, teacher, data.batches, ranks, config.train, state)
        training = Training(*learning, folder.checkpoints, config.precision)
        log = stack.enter_context(RunLog(run, state, training.limits, tracker))
        evaluation = PeriodicEvaluation(run, evaluator, tracker)
        record = train_profiled(run, training, log, observers, evaluation, record)
        if record.training.ended_by == TRIAL:
            return record
        return publish(run, complete_record(record, run, state, evaluation, baseline), page, resolved)


def identity_of(config: Config, models: RunModels, data: Prepared, steps: int, ranks: Ranks) -> Identity:
    """What the student of a run of so many steps depends on.

    Raises:
        SettingError: ranks would score other sets, or the text has tokens that one of the models cannot read.
    """
    refuse_tokens_beyond(models.vocabulary, data.tokens.counts, data.sets, data.batches.collator)
    refuse_differing_ranks(set_digests(data.sets), ranks)
    digests = {**models.digests, "corpus": data.tokens.digest}
    return run_identity(config, digests, data.batches, steps, data.sets)


def enter_ranks(config: Config, stack: ExitStack) -> Ranks:
    """The ranks of the run, which have the same settings; only rank 0 logs."""
    ranks = stack.enter_context(join_ranks(config.backend))
    configure_logging(ranks.rank)
    transformers_logging.disable_progress_bar()  # its bars would garble the progress line
    refuse_differing_settings(config.compared, ranks)
    ranks.decide(lambda: trackers.check(config.tracker))  # rank 0 alone has it
    return ranks


def make_page(config: Config, path: Path, recipe: str, command: str, ranks: Ranks) -> RunPage:
    """The page of the run; a trial that ends with its profile leaves none, as it leaves no report."""
    every = config.report.every if config.profile.stop_after is None else None
    return RunPage(path, recipe, command, every, config.train.minutes, ranks)


def choose_task(config: Config, terms: dict[str, Term]) -> Task:
    """What is predicted; of labelled examples it has read the classes, which decide what models are loaded."""
    return find_task(config.objective.task, terms.values()).read(config)


def num_steps(config: Config, batches: Batches) -> int:
    """The steps of the run, wall-clock aside. Raises SettingError for snapshots or a choice of the best beyond them."""
    steps = total_steps(config.train, batches.steps_per_epoch)
    check_snapshots(config.train, steps)
    check_best(config, steps, batches.steps_per_epoch)
    return steps


def choose_schedule(config: Config, batches: Batches) -> Schedule:
    """The schedule of a run over these batches. Raises SettingError where it does not fit the run's length."""
    steps = length_in_steps(config.train, batches.steps_per_epoch)
    return make_schedule(config.schedule.make, steps, optim.peak_lr(config.optimizer, batches.sequences_per_step))


def resolve_precision(config: Config, folder: RunFolder) -> tuple[Config, dict[str, Any]]:
    """Choose number formats and threads where the settings leave them open.

    Returns:
        The settings with a format in place of every `auto`, and what each checkpoint keeps of it for a resume.
    """
    recorded = folder.recorded_precision()
    precision = choose_precision(config.precision, recorded, folder.ranks)
    threads = keep_threads(config.backend, recorded, folder.ranks)
    return config.changed(precision=precision), dict(precision) | threads


def found_layers(config: Config, models: RunModels, pair: Pair) -> dict[str, Any] | None:
    """The layers that this run, or the one that it resumes, has found for `student.layers=auto`; None without such."""
    settings, were_open = config.student, models.student is None
    if not were_open or not settings.from_layers or settings.layers == AUTO:
        return None
    return pair.built.search or {"layers": settings.layers}


def make_objective(
    config: Config, terms: dict[str, Term], batches: Batches, steps: int, vocab: int, ranks: Ranks
) -> Objective:
    """The objective of a run of so many steps; one that the clock alone ends is long from `LONG_MINUTES` on."""
    if steps == ENDLESS and (config.train.minutes or 0.0) < LONG_MINUTES:
        steps = 0  # how many it will be is open, and a compiler would take a good part of the time
    num_positions = steps * batches.sequences_per_step * batches.sequences.shape[1]
    return build_objective(terms, config.objective, config.precision, vocab, num_positions, ranks.device)


def make_learner(run: Run, schedule: Schedule) -> Learner:
    """What is trained, with its gradients' exchange and its optimizer. Raises SettingError as `make_trainable` does."""
    trainable, settings = make_trainable(run), run.config.optimizer
    sync = gradient_sync(run.ranks, trainable)
    return Learner(trainable, sync, optim.build(trainable, settings), schedule, settings)


def make_trainable(run: Run) -> Trainable:
    """What is trained, on this rank's device.

    Raises:
        SettingError: memory is sure not to hold a micro-batch, or a loss of the user's does not work.
    """
    student, precision, checkpoints = run.pair.student, run.config.precision, run.config.student.gradient_checkpointing
    require_memory_for_step(student, precision.student, *run.data.batches.shape, run.ranks, checkpoints)
    trainable = setup_student(student, run.objective, precision, run.ranks, checkpoints)
    check_losses(run.objective, run.config.objective, run.ranks.device)  # with the terms' modules on their device
    return trainable


def choose_caches(run: Run, digests: dict[str, str | None]) -> dict[str, Cache]:
    """The caches of teachers that the settings request, by the name of the teacher.

    A cache serves any device and number format: the key names neither, but for int8, which changes probabilities.
    """
    data, objective = run.data, run.objective
    key = {
        "tokens": data.tokens.digest,
        "masks": data.batches.collator.identity,
        "seed": None if run.pair.kind.causal else run.config.seed,  # it draws masks
        "soft_positions": "all" if objective.visits_all_rows else "masked",
        "temperature": objective.top_k_temperature,
        "vocabulary": run.pair.vocabulary,
    }
    return find_caches(run.config, digests, key, data.batches, objective)


def make_evaluator(run: Run) -> Evaluator:
    """What scores models, by the measures of the task; it has shown that there is memory for it.

    Raises:
        SettingError: `optimize` names a number that the results of this run will not have.
    """
    config, pair, sets = run.config, run.pair, run.data.sets
    if pair.trained_head:
        evaluator = run.task.evaluator(config, pair.tokenizer, sets, run.ranks)
    else:
        evaluator = loss_evaluator(run)
    # The teacher of a baseline has only given layers: it is not scored, nor brought to this rank's device.
    scored = pair.scored_teachers if run.objective.needs_teacher else []
    if (goal := Goal.of(config.optimize)) is not None:
        agrees = run.objective.needs_teacher and pair.comparable and pair.kind.vocabulary
        has_gap = bool(scored) and config.evaluate.baseline is not None
        goal.check(evaluator.measures, [data.name for data in sets], run.objective.terms, agrees, has_gap)
    check_memory(evaluator, [pair.student, *(member.model for member in scored)], sets)
    return evaluator


def describe_once(
    run: Run, caches: dict[str, Cache], evaluator: Evaluator, recipe: str, command: str, notes: list[str]
) -> Record:
    """The record of a run that is about to train, which rank 0 makes for all, as it may ask the Hub and git."""
    describing = lambda: describe(run, caches, evaluator.measures, recipe, command, notes).to_json()  # noqa: E731
    return Record.from_json(run.ranks.decide(describing))


def make_callbacks(
    run: Run, record: Record, state: State, observers: dict[str, object], log: RunLog
) -> tuple[Callback, ...]:
    """What is called during the training, in this order.

    Args:
        record: of the run as it begins.
        state: where the training begins.
        observers: the user's, by name, on rank 0.
    """
    snapshots = make_snapshots(run, record, state)
    snapshots.warn_of_past(state.step)
    return log, snapshots, UserObservers({*run.config.observers}, observers, run.ranks)


def train_profiled(
    run: Run,
    training: Training,
    log: RunLog,
    observers: dict[str, object],
    evaluation: PeriodicEvaluation,
    record: Record,
) -> Record:
    """Train; gives the record with what has ended it, and with where the time went.

    Args:
        observers: the user's, by name, on rank 0.
        record: of the run as it begins.
    """
    config, batches, ranks = run.config, run.data.batches, run.ranks
    callbacks = make_callbacks(run, record, training.state, observers, log)
    recording = profiling.recorder(config, run.folder.path, batches, ranks)
    is_trial = config.profile.stop_after is not None
    with nullcontext() if is_trial else saved_when_a_rank_is_lost(training), recording as recorder:
        ended_by = train(training, run.objective, callbacks, evaluation)
    log.end_training()
    profile = profiling.gather_profile(recorder, config, batches, ranks, record.identity)
    record = record.changed(training=record.training.changed(ended_by=ended_by), profile=profile)
    return record if ended_by == TRIAL else record.changed(best=load_best(run, training, evaluation))


def load_best(run: Run, training: Training, evaluation: PeriodicEvaluation) -> Best | None:
    """Put the student of the best evaluation into the place of the last one, where the settings require that."""
    learner, last = training.learner, training.state.step
    best = run.folder.load_best(learner.model, learner.optimizer, last)
    if best is not None and best.step not in (None, last):
        evaluation.evaluator.forget("student")  # the last one's
        logger.info(f"the student after step {best.step:,} is published, the best by train.keep_best")
    return best


def publish(run: Run, record: Record, page: RunPage, resolved: str) -> Record:
    """Write everything that the run leaves, the report in place of the page of the run; gives the record."""
    record = record.redacted()
    page.stop()
    write_outputs(run, record, resolved)
    page.publish()
    run.ranks.barrier()
    return record
