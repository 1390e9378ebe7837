"""One job from settings to report, each part made once, in reading order."""

from contextlib import ExitStack
from pathlib import Path

from transformers.utils import logging as transformers_logging

from distill.config.settings import Config
from distill.data.batches import Batches
from distill.distributed import Ranks, join_ranks
from distill.distributed.rank_identity import refuse_differing_ranks, refuse_differing_settings
from distill.evaluation.evaluator import Evaluator
from distill.evaluation.speed import check_memory
from distill.objective.build import build_objective, make_terms
from distill.objective.objective import Objective
from distill.objective.terms import Term
from distill.optim.schedule import ENDLESS, total_steps
from distill.report.comparison.columns import Goal, choose_best
from distill.report.live import RunPage
from distill.report.publish import Snapshots, write_outputs
from distill.runs import trackers
from distill.runs.baseline import find_baseline
from distill.runs.callbacks import RunLog, UserObservers, check_snapshots
from distill.runs.check import check
from distill.runs.describe import announce, describe, notes_of
from distill.runs.facts import Best
from distill.runs.identity import run_identity, set_digests
from distill.runs.learning import FrozenTeachers, make_learner
from distill.runs.on_policy import make_on_policy
from distill.runs.outcome import complete_record
from distill.runs.pair import find_start, load_teachers, make_pair
from distill.runs.periodic_evaluation import PeriodicEvaluation, check_best
from distill.runs.profile.bottleneck import gather_profile, recorder
from distill.runs.record import Record
from distill.runs.run import Run
from distill.runs.run_folder import RunFolder
from distill.runs.setup import resolve_auto, start_is_open
from distill.runs.term_losses import loss_evaluator
from distill.runs.tokenizers import refuse_tokens_beyond
from distill.runtime.progress import configure_logging
from distill.tasks import find_task
from distill.train import TRIAL, Training, train

LONG_MINUTES = 10.0  # of a run that is worth the start of a compiler, whatever its steps


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
        training, record, log = begin(run, page, recipe, command, resolved)
        stack.enter_context(log)
        with recorder(run) as recorded:
            ended_by = train(training)
        log.progress.close()
        ended = record.training.changed(ended_by=ended_by)
        record = record.changed(training=ended, profile=gather_profile(recorded, run))
        return record if ended_by == TRIAL else publish(training, record, page, resolved)


def begin(run: Run, page: RunPage, recipe: str, command: str, resolved: str) -> tuple[Training, Record, RunLog]:
    """All that the training needs, and the record of the run as it begins; from then on the folder is this run's.

    Raises:
        SettingError: something of the run is refused; no file of an earlier one has changed then.
    """
    config, folder, ranks = run.config, run.folder, run.ranks
    learner, teachers = make_learner(run), FrozenTeachers(run)
    state = folder.load(learner.model, learner.optimizer)
    evaluator, best = make_evaluator(run)
    observers = UserObservers(config.own_observers, folder.path, ranks)
    page.begin(state.seconds, None if run.steps == ENDLESS else run.steps)
    notes = notes_of(run)
    announce(run, recipe, notes, state)
    teacher = teachers.open()  # caches that are missing are made
    describing = lambda: describe(run, teachers.caches, evaluator.measures, recipe, command, notes).to_json()  # noqa: E731
    record = Record.from_json(ranks.decide(describing)).changed(best=best)  # it may ask the Hub and git
    tracker = trackers.open_on_rank_0(config.tracker, folder.path, config.written, ranks)
    folder.begin(state, resolved, run.pair.layers)
    folder.checkpoints.begin(best, precision=run.formats, layers=run.pair.layers, began_from=folder.beginning())
    page.describe(record)
    snapshots = Snapshots(run, record, state)
    snapshots.warn_of_past(state.step)
    evaluation = PeriodicEvaluation(run, evaluator, tracker)
    log = RunLog(run, state, tracker)
    writer = make_on_policy(run, learner.model.student)
    return Training(run, learner, teacher, state, (log, snapshots, observers), evaluation, writer), record, log


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


def make_run(config: Config, folder: RunFolder) -> Run:
    """The models and the text of a run, and its objective. A pair that does not fit is refused before text is read.

    Raises:
        SettingError: what is there does not fit the settings, or something else of the run.
    """
    ranks = folder.ranks
    config, formats, layers = resolve_auto(config, folder.recorded, ranks)
    terms = make_terms(config.objective)
    task = find_task(config.objective.task, terms.values()).read(config)
    teachers = load_teachers(config, task, terms, ranks)
    pair = make_pair(config, task, terms, teachers, layers, ranks)
    data = task.prepare(config, teachers.tokenizer, ranks)  # training sequences in their order, evaluation sets
    refuse_tokens_beyond(pair.vocabulary, data.tokens.counts, data.sets, data.batches.collator)
    refuse_differing_ranks(set_digests(data.sets), ranks)
    steps = total_steps(config.train, data.batches.steps_per_epoch)  # wall-clock aside
    check_snapshots(config.train, steps)
    check_best(config, steps, data.batches.steps_per_epoch)
    digests = {**pair.digests, "corpus": data.tokens.digest}
    identity = run_identity(config, digests, data.batches, steps, data.sets)
    if start_is_open(config.student, layers):
        config, layers, refitted = find_start(config, task, teachers, layers, data.batches, ranks)
        pair = make_pair(config, task, terms, teachers, layers, ranks, refitted)
    baseline = find_baseline(config, identity, steps, terms)
    objective = make_objective(config, pair.terms, data.batches, steps, pair.vocabulary, ranks)
    return Run(config, formats, task, pair, data, objective, identity, baseline, folder, ranks)


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
        is_scored = bool(scored) and pair.teacher is not None
        agrees, has_gap = is_scored and pair.kind.vocabulary, is_scored and config.evaluate.baseline is not None
        goal.check(evaluator.measures, names, run.objective.terms, agrees, has_gap)
    best = choose_best(config.train, evaluator.measures, names)
    check_memory(evaluator, [pair.student, *(member.model for member in scored)], sets)
    return evaluator, best


def publish(training: Training, record: Record, page: RunPage, resolved: str) -> Record:
    """Score the models, and write all that the run leaves, the report in place of its page; gives the record."""
    run, learner, state, evaluation = training.run, training.learner, training.state, training.evaluation
    record = record.changed(best=run.folder.load_best(learner.model, learner.optimizer, state.step))
    learner.optimizer.state.clear()  # its memory is for the models that are scored side by side
    record = complete_record(record, run, state, evaluation).redacted()
    page.stop()
    write_outputs(run, record, resolved)
    page.publish()
    run.ranks.barrier()
    return record
