"""The loop: teacher, forward, backward, one exchange, update; then log, save, evaluate."""

import logging
import math
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from distill.config.settings import OnUsr1
from distill.data.batch import Batch
from distill.distributed import GradientSync
from distill.models.kernels.dropout import keyed_by_sequence
from distill.objective.objective import Objective
from distill.objective.running_mean import TOKENS
from distill.objective.trainable import Trainable
from distill.optim.schedule import rate_fraction
from distill.optim.updates import bound_of_rank, clip_gradients, peak_lr, set_learning_rate
from distill.runs.divergence import DivergenceCheck
from distill.runs.learning import Learner
from distill.runs.on_policy import OnPolicy, Samples
from distill.runs.periodic_evaluation import PeriodicEvaluation
from distill.runs.profile.phases import (
    BACKWARD,
    CHECKPOINT,
    DATA,
    EVALUATION,
    EXCHANGE,
    FORWARD,
    OPTIMIZER,
    SAMPLING,
    TEACHER,
    end_step,
    phase,
)
from distill.runs.run import Run
from distill.runs.state import State
from distill.runs.step import Callback, StepResult, StepStats, Window
from distill.runtime.errors import Interrupted, RankLost
from distill.runtime.seed import key
from distill.runtime.signals import ALL, SAVING, Signals, handled
from distill.teacher.output import Teacher

TRIAL = "profile.stop_after"  # what ends a run that is only to be profiled
PATIENCE = "patience"  # what ends a run whose evaluations get no better

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Training:
    """A run with what learns in it, what that learns from, how far it is, and what is done on the way."""

    run: Run
    learner: Learner
    teacher: Teacher
    state: State  # updated in place
    callbacks: tuple[Callback, ...]  # called in this order
    evaluation: PeriodicEvaluation
    on_policy: OnPolicy | None  # what writes the text of some steps

    @property
    def is_trial(self) -> bool:
        """Whether the run is for its profile alone: it saves nothing, and is not scored."""
        return self.run.config.profile.stop_after is not None


def accumulate_gradients(
    model: Trainable,
    teacher: Teacher,
    objective: Objective,
    window: list[Batch],
    scales: torch.Tensor,
    sync: GradientSync,
    overlap: bool = True,
) -> torch.Tensor:
    """Teacher, forward and backward of every micro-batch of a window; the gradients add up in the bucket of `sync`.

    Args:
        window: this rank's micro-batches of the step, M of them.
        scales: what the sum of each of the T terms is multiplied by: [T], on the device of the ranks.
        overlap: let the exchange begin during the last backward.

    Returns:
        The sums of the terms in each micro-batch, without the scales, [M, T].
    """
    sums = scales.new_zeros(len(window), len(scales))
    sync.zero()
    with model.student.weight_cast_cache(), sync.ranks.computing():
        teacher_outputs = teacher.outputs(window, objective.teacher_spec)
        for number, batch in enumerate(window):
            with phase(TEACHER):
                teacher_output = next(teacher_outputs)
            with sync.micro_batch(number == len(window) - 1, overlap), keyed_by_sequence(batch.dropout_keys):
                with phase(FORWARD):
                    loss, sums[number] = objective(model, teacher_output, batch, scales)
                with phase(BACKWARD):
                    loss.backward()
    return sums


def step(
    training: Training, window: Window, windows: Iterator[list[Batch]], signals: Signals
) -> tuple[StepResult, Window]:
    """Teacher, forward and backward of a window, one exchange between the ranks, one update; gives the next window.

    The weights stay as they are where the loss or the gradient is not finite on any rank.
    """
    run, learner, state, began = training.run, training.learner, training.state, time.monotonic()
    model, sync, objective, batches, ranks = learner.model, learner.sync, run.objective, run.data.batches, run.ranks
    window, samples = on_policy(training, window)
    # Where dropout is not keyed by sequence, one stream per step and rank: nothing to save, the same after a resume.
    torch.manual_seed(int(key(batches.seed, "dropout", state.step, ranks.rank) >> 1))
    objective.begin_step(run.limits.progress(state.step, window.clock))
    # Every term is linear in its scale, also where the objective writes the head's gradient by hand.
    scales = objective.scales(window.counts, ranks.device) * state.loss_scale.factor
    bound = bound_of_rank(learner.settings, ranks.size)
    rank_sums = accumulate_gradients(
        model, training.teacher, objective, window.batches, scales, sync, overlap=bound is None
    )
    if bound is not None:
        clip_gradients(model, bound * state.loss_scale.factor)
    with phase(DATA):
        wait_began = time.monotonic()
        upcoming = next(windows, [])
        data_wait = time.monotonic() - wait_began
    # One exchange a step, and all ranks decide alike: the losses, the counts of the next window, signals and rank 0's
    # clock ride along.
    clock = state.seconds + time.monotonic() - began if ranks.rank == 0 else 0.0
    is_writing = run.folder.checkpoints.is_writing
    packed = StepStats.pack(rank_sums.sum(0), objective.count(upcoming), signals.requests(), is_writing, clock)
    with phase(EXCHANGE):
        summed = sync.all_reduce_gradients(packed)
    assert summed is not None
    with phase(OPTIMIZER), run.ranks.computing():  # clipping and LAMB exchange norms of sharded weights
        if state.loss_scale.factor != 1:
            sync.scale(1 / state.loss_scale.factor)
        norm = clip_gradients(model, learner.settings.clip)
        # The step waits for a GPU here alone (`tests/test_waits.py`), and takes all numbers at once: whether all is
        # finite is known from what is read anyway.
        *values, grad_norm = torch.cat([summed, norm.detach().to(summed).reshape(1)]).tolist()
        stats = StepStats.unpack(values, len(objective.names))
        lr = peak_lr(learner.settings, batches.sequences_per_step)
        lr *= rate_fraction(learner.schedule, run.limits.progress(state.step, stats.clock))
        if math.isfinite(sum(stats.sums)) and math.isfinite(grad_norm):
            set_learning_rate(learner.optimizer, lr)
            learner.optimizer.step()
    counts, done = objective.by_name(window.counts.tolist()), state.step + 1
    result = StepResult(
        step=done, epoch=done / batches.steps_per_epoch, tokens=state.tokens + int(counts[TOKENS]),
        sums=objective.by_name(stats.sums), counts=counts, weights=objective.weights, batches=window.batches,
        rank_sums=rank_sums, lr=lr, grad_norm=grad_norm, loss_scale=state.loss_scale.value,
        seconds=time.monotonic() - began, data_wait=data_wait, over=run.limits.reached(done, stats.clock),
        stop=signals.agreed_stop(stats.requests), save_requested=stats.requests[ALL.index(SAVING)] > 0,
        writing=stats.num_writing > 0, samples=samples,
    )  # fmt: skip
    return result, Window(upcoming, torch.tensor(stats.next_counts, dtype=torch.float64), stats.clock)


def on_policy(training: Training, window: Window) -> tuple[Window, Samples | None]:
    """The window of a step, with completions by the student where this step learns from these, and what they are like.

    Only then is it known how many positions have a loss: the ranks count them in an exchange of their own.
    """
    run, step, writer = training.run, training.state.step, training.on_policy
    progress = run.limits.progress(step, window.clock)
    if writer is None or not writer.applies(step, progress):
        return window, None
    with phase(SAMPLING):
        written, samples = writer.window(step, progress)
        batches = [training.teacher.read_ahead(batch).to(run.ranks.device) for batch in written]
        counts = run.ranks.sum(run.objective.count(batches))
    return Window(batches, counts, window.clock), samples


def train(training: Training) -> str:
    """Train from `training.state` to the end of the run, and return what ended it.

    That is epochs, steps, minutes, patience or its profile. The state is updated in place. Rank 0 saves.

    Raises:
        Diverged: `train.max_nonfinite` steps in a row had a loss or gradient that was not finite, `train.max_spike`
            had a loss above `train.max_loss_ratio` times that of the first step, or the run ends in one of these
            states or without any step that was taken. The checkpoints that may have diverged are renamed.
        Interrupted: a signal came that stops, on this rank or another one; the message names what is saved.
    """
    run, state, settings, is_trial = training.run, training.state, training.run.config.train, training.is_trial
    divergence, evaluation, begun_at = DivergenceCheck(run, training.teacher), training.evaluation, state.step
    saver = Saver(training)
    over, save_due, out_of_patience = run.limits.reached(state.step, state.seconds), False, False
    if state.step and (evaluation.due(state.step) or over):
        # Interrupted between this step's checkpoint and the end of its evaluation.
        divergence.check(state, over)
        out_of_patience = evaluate(training)
    state.loss_scale.begin(training.learner.model.student.precision == "fp16")
    windows = run.data.batches.stream(state.step, run.limits.steps, run.ranks.device, training.teacher.read_ahead)
    first = next(windows, [])  # whose counts have no exchange of a step to ride in
    run.ranks.barrier()  # one may read for longer than the others wait in an exchange
    window = Window(first, run.ranks.sum(run.objective.count(first)), state.seconds)
    with handled() as signals, signals.deferred(), saved_on_the_way_out(training, signals):
        signals.raise_if_stopped()  # for one that came where Python drops errors, as in callbacks of its imports
        signals.on_usr1(settings.on_usr1 is OnUsr1.stop)
        while not (over or out_of_patience):
            result, window = step(training, window, windows, signals)
            state.add(int(result.counts[TOKENS]), result.seconds)
            result, over = replace(result, diverged=divergence.after_step(state, result)), result.over
            for callback in training.callbacks:
                callback.after_step(result)

            at_evaluation = (over or evaluation.due(state.step)) and not is_trial
            save_due |= at_evaluation or state.step % settings.save_every == 0
            save_due |= result.save_requested or result.stop is not None
            # What comes now needs the folder, or tells the user that the checkpoint is on the disk.
            waits = at_evaluation or result.save_requested or result.stop is not None or result.diverged != ""
            if waits or not result.writing:
                saver.finish()
            saved = False
            # Else after the next good step; a trial leaves none.
            if save_due and not (is_trial or state.skipped_in_a_row or result.diverged):
                save_due, saved = False, saver.save(overlap=settings.async_checkpoints and not waits)
            if result.save_requested:
                logger.info(f"SIGUSR1 at step {state.step}, {saved_or_not(saved, is_trial)}")
            divergence.check(state, over)
            if result.stop is not None:
                signals.received.clear()
                raise interrupted(state.step, result.stop, saved, is_trial)
            if at_evaluation:
                with signals.deferred(False):  # an evaluation loses nothing
                    out_of_patience = evaluate(training)
            end_step()
            over |= state.step - begun_at == run.config.profile.stop_after
    if is_trial:
        return TRIAL
    return run.limits.ended_by(state.step) if over else PATIENCE


def evaluate(training: Training) -> bool:
    """Score the student where the settings select this evaluation; the means of the losses begin anew.

    Returns:
        Whether the run ends here because as many evaluations as `train.patience` have followed the best one.
    """
    run, state = training.run, training.state
    with phase(EVALUATION):
        point = training.evaluation.evaluate(state, state.losses.means(run.objective.names))
    state.begin_interval()
    for callback in training.callbacks:
        callback.at_evaluation(point)
    if (patience := run.config.train.patience) is None:
        return False
    best = run.folder.checkpoints.best() if run.ranks.rank == 0 else None
    is_over: bool = run.ranks.broadcast(best is not None and best.later >= patience)
    return is_over


class Saver:
    """Saves the checkpoints of a training; all ranks call each method together."""

    def __init__(self, training: Training) -> None:
        self.training, self.ranks, self.checkpoints = training, training.run.ranks, training.run.folder.checkpoints
        self.writes = self.ranks.rank == 0 or self.ranks.shards_student
        self._new: Path | None = None  # a checkpoint that the callbacks have not been called for

    def save(self, overlap: bool) -> bool:
        """Save a checkpoint, wait for the ranks that write it, and call the callbacks; the same answer on all ranks.

        Args:
            overlap: wait until it is copied, and leave the rest to the next `finish`.

        Returns:
            Whether there is one; weights that are not finite are not saved.
        """
        self.finish()
        state, learner, saved = self.training.state, self.training.learner, True
        with phase(CHECKPOINT):
            if self.writes:
                saved = self.checkpoints.save(state, learner.model, learner.optimizer, overlap)
        # Rank 0 may write for longer than the others wait in an exchange, and the end of one ends it too.
        self.ranks.barrier()
        saved = self.ranks.broadcast(saved)
        self._new = self.checkpoints.path_of(state.step) if saved else None
        if not overlap:
            self._call_callbacks()
        return saved

    def finish(self) -> None:
        """Wait until the checkpoint that is being written, if there is one, is on the disk, and call the callbacks."""
        if self._new is not None:
            with phase(CHECKPOINT):
                if self.writes:
                    self.checkpoints.finish()
            self.ranks.barrier()
            self._call_callbacks()

    def _call_callbacks(self) -> None:
        folder, self._new = self._new, None
        if folder is not None:
            for callback in self.training.callbacks:
                callback.at_checkpoint(folder)


@contextmanager
def saved_on_the_way_out(training: Training, signals: Signals) -> Iterator[None]:
    """Whatever ends a training, rank 0 first gives the checkpoint that is being written its name.

    Where another rank is lost it also saves the last whole step: only the step under way is lost. It needs no other
    rank where each holds all weights; and nothing of the step under way, as weights and state change only after the
    last exchange of a step.
    """
    try:
        yield
    except BaseException as error:
        run, learner, state = training.run, training.learner, training.state
        if run.ranks.rank == 0 and not run.ranks.shards_student:
            run.folder.checkpoints.finish()
            if isinstance(error, RankLost) and state.step and not (state.skipped_in_a_row or training.is_trial):
                run.folder.checkpoints.save(state, learner.model, learner.optimizer)
                signals.received.clear()  # this process ends anyway, by the loss
        raise


def saved_or_not(saved: bool, is_trial: bool) -> str:
    if is_trial:
        return "in a profiling run (profile.stop_after), which saves nothing"
    return "its checkpoint is written" if saved else "which is not saved: it was skipped or its weights are not finite"


def interrupted(step: int, number: int, saved: bool, is_trial: bool) -> Interrupted:
    what = f"stopped by {signal.Signals(number).name} at step {step}, {saved_or_not(saved, is_trial)}"
    end = "" if is_trial else f"; the same command resumes {'there' if saved else 'from the newest checkpoint'}"
    return Interrupted(what + end, number)
