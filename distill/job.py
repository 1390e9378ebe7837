"""One job from settings to report, each part made once, in reading order."""

import logging
from contextlib import ExitStack, nullcontext
from pathlib import Path

from transformers.utils import logging as transformers_logging

from distill.config.settings import Config
from distill.data.batches import Batches
from distill.distributed import Ranks, join_ranks
from distill.distributed.rank_identity import refuse_differing_ranks, refuse_differing_settings
from distill.evaluation.evaluator import Evaluator
from distill.evaluation.memory_check import check_memory
from distill.objective.build import build_objective, make_terms
from distill.objective.objective import Objective
from distill.objective.terms import Term
from distill.optim.schedule import ENDLESS, total_steps
from distill.report.comparison.columns import Goal, choose_best
from distill.report.live import RunPage
from distill.report.publish import make_snapshots, write_outputs
from distill.runs import profiling, trackers
from distill.runs.baseline import find_baseline
from distill.runs.callbacks import RunLog, UserObservers, check_snapshots, make_observers
from distill.runs.check import check
from distill.runs.describe import announce, describe, notes_of
from distill.runs.facts import Best
from distill.runs.identity import Identity, run_identity, set_digests
from distill.runs.learning import FrozenTeachers, make_learner
from distill.runs.outcome import complete_record
from distill.runs.pair import Pair, load_teachers, make_pair, search_layers
from distill.runs.periodic_evaluation import PeriodicEvaluation, check_best
from distill.runs.record import Record
from distill.runs.run import Run
from distill.runs.run_folder import RunFolder
from distill.runs.setup import layers_are_open, resolve_auto
from distill.runs.state import State
from distill.runs.step import Callback
from distill.runs.term_losses import loss_evaluator
from distill.runs.tokenizers import refuse_tokens_beyond
from distill.runtime.progress import configure_logging
from distill.tasks import Prepared, find_task
from distill.train import TRIAL, Training, saved_when_a_rank_is_lost, train

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
        ranks = enter_ranks(config, stack)
        folder = stack.enter_context(RunFolder(path, config.resume, config.train.keep, ranks))
        page = stack.enter_context(make_page(config, path, recipe, command, ranks))
        run = make_run(config, folder)
        if (finished := folder.finished(run.identity, run.steps, config.train.length)) is not None:
            return folder.leave_finished(finished, resolved)

        # Whatever may refuse the run comes before `folder.begin`: so far no file of the run changes.
        learner, frozen = make_learner(run), FrozenTeachers(run)
        state = folder.load(learner.model, learner.optimizer)
        evaluator, best = make_evaluator(run)
        observers = make_observers(config.own_observers, path, ranks)
        page.begin(state.seconds, None if run.steps == ENDLESS else run.steps)
        notes = notes_of(run)
        announce(run, recipe, notes, state)
        teacher = frozen.open()  # caches that are missing are made
        describing = lambda: describe(run, frozen.caches, evaluator.measures, recipe, command, notes).to_json()  # noqa: E731
        record = Record.from_json(ranks.decide(describing)).changed(best=best)  # it may ask the Hub and git
        tracker = trackers.open_on_rank_0(config.tracker, path, config.written, path.name, ranks)
        folder.begin(state, resolved, run.pair.layers)
        page.describe(record)

        folder.checkpoints.begin(run.formats, best, folder.beginning())
        parts = (learner, teacher, run.data.batches, ranks, config.train, state, folder.checkpoints)
        training = Training(*parts, run.config.precision)
        log = stack.enter_context(RunLog(run, state, training.limits, tracker))
        evaluation = PeriodicEvaluation(run, evaluator, tracker)
        record = train_profiled(run, training, log, observers, evaluation, record)
        if record.training.ended_by == TRIAL:
            return record
        return publish(run, complete_record(record, run, state, evaluation), page, resolved)


def make_run(config: Config, folder: RunFolder) -> Run:
    """The models and the text of a run, and its objective. A pair that does not fit is refused before text is read.

    Raises:
        SettingError: what is there does not fit the settings, or something else of the run.
    """
    ranks = folder.ranks
    config, formats, layers = resolve_auto(config, folder)
    searches = layers_are_open(config.student) and not folder.recorded
    terms = make_terms(config.objective)
    task = find_task(config.objective.task, terms.values()).read(config)
    teachers = load_teachers(config, task, terms, ranks)
    pair = make_pair(config, task, terms, teachers, layers, searches, ranks)
    data = task.prepare(config, teachers.tokenizer, ranks)  # training sequences in their order, evaluation sets
    steps = num_steps(config, data.batches)
    identity = identity_of(config, pair, data, steps, ranks)
    if searches:
        config, layers = search_layers(config, task, teachers, data.batches, ranks)
        pair = make_pair(config, task, terms, teachers, layers, False, ranks)
    baseline = find_baseline(config, identity, steps, terms)
    objective = make_objective(config, pair.terms, data.batches, steps, pair.vocabulary, ranks)
    return Run(config, formats, task, pair, data, objective, identity, baseline, folder, ranks)


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


def identity_of(config: Config, pair: Pair, data: Prepared, steps: int, ranks: Ranks) -> Identity:
    """What the student of a run of so many steps depends on.

    Raises:
        SettingError: ranks would score other sets, or the text has tokens that one of the models cannot read.
    """
    refuse_tokens_beyond(pair.vocabulary, data.tokens.counts, data.sets, data.batches.collator)
    refuse_differing_ranks(set_digests(data.sets), ranks)
    return run_identity(config, {**pair.digests, "corpus": data.tokens.digest}, data.batches, steps, data.sets)


def num_steps(config: Config, batches: Batches) -> int:
    """The steps of the run, wall-clock aside. Raises SettingError for snapshots or a choice of the best beyond them."""
    steps = total_steps(config.train, batches.steps_per_epoch)
    check_snapshots(config.train, steps)
    check_best(config, steps, batches.steps_per_epoch)
    return steps


def make_objective(
    config: Config, terms: dict[str, Term], batches: Batches, steps: int, vocab: int, ranks: Ranks
) -> Objective:
    """The objective of a run of so many steps; one that the clock alone ends is long from `LONG_MINUTES` on."""
    if steps == ENDLESS and (config.train.minutes or 0.0) < LONG_MINUTES:
        steps = 0  # how many it will be is open, and a compiler would take a good part of the time
    num_positions = steps * batches.sequences_per_step * batches.sequences.shape[1]
    return build_objective(terms, config.objective, config.precision, vocab, num_positions, ranks.device)


def make_evaluator(run: Run) -> tuple[Evaluator, Best | None]:
    """What scores models, by the measures of the task, and by which of them the best student is chosen.

    Raises:
        SettingError: `optimize` or `train.keep_best` names a number that the results of this run will not have, or
            there is no memory to score its models.
    """
    config, pair, sets = run.config, run.pair, run.data.sets
    if pair.trained_head:
        evaluator = run.task.evaluator(config, pair.tokenizer, sets, run.ranks)
    else:
        evaluator = loss_evaluator(run)
    names = [data.name for data in sets]
    # The teacher of a baseline has only given layers: it is not scored, nor brought to this rank's device.
    scored = pair.scored_teachers if run.objective.needs_teacher else []
    if (goal := Goal.of(config.optimize)) is not None:
        agrees = run.objective.needs_teacher and pair.comparable and pair.kind.vocabulary
        has_gap = bool(scored) and config.evaluate.baseline is not None
        goal.check(evaluator.measures, names, run.objective.terms, agrees, has_gap)
    best = choose_best(config.train, evaluator.measures, names)
    check_memory(evaluator, [pair.student, *(member.model for member in scored)], sets)
    return evaluator, best


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
