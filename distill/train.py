"""The loop: window, forward, backward, one exchange, step; then log, save, evaluate."""

import logging
import math
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import torch

from distill.config.settings import OnUsr1, OptimizerFlags, TrainConfig
from distill.data.batch import Batch
from distill.data.batches import Batches
from distill.distributed import Backend
from distill.models.kernels.dropout import keyed_by_row
from distill.objective.objective import Objective
from distill.objective.tally import TOKENS, Tally
from distill.objective.trainable import Trainable
from distill.optim.schedule import Schedule, progress_of, share, total_steps
from distill.optim.updates import bound_of_rank, clip, peak_lr, set_learning_rate
from distill.runs.checkpoint import Checkpoints, State
from distill.runs.curve import Curve
from distill.runs.divergence import offending_rows
from distill.runs.milestones import Milestones
from distill.runs.points import Points
from distill.runs.profile import phases
from distill.runs.profile.recorder import UNPROFILED, Recorder, Unprofiled
from distill.runtime.errors import Diverged, Interrupted, RankLost
from distill.runtime.seed import key
from distill.runtime.signals import ALL, SAVING, handled
from distill.teacher.signal import Teacher

TRIAL = "profile.stop_after"  # what ends a run that is only to be profiled

logger = logging.getLogger(__name__)


class Observer(Protocol):
    """Who follows a training."""

    def log_metrics(self, metrics: dict[str, float]) -> None:
        """The metrics of every `log_every`-th step."""
        ...

    def at_point(self, state: State, epochs: float, losses: dict[str, float]) -> None:
        """At each point of the history (`Points`), and once more for the same step after a resume from there.

        Args:
            epochs: how many are done.
            losses: `total` and the mean of each term since the point before.
        """
        ...


@dataclass
class Training:
    """Everything that `train` needs."""

    model: Trainable
    teacher: Teacher
    batches: Batches
    objective: Objective
    optimizer: torch.optim.Optimizer
    backend: Backend
    state: State
    settings: TrainConfig
    schedule: Schedule
    optimizer_settings: OptimizerFlags
    checkpoints: Checkpoints
    observer: Observer
    points: Points = field(default_factory=Points)
    milestones: Milestones | None = None
    curve: Curve | None = None
    profile: Recorder | Unprofiled = UNPROFILED


def accumulate_gradients(
    model: Trainable,
    teacher: Teacher,
    objective: Objective,
    window: list[Batch],
    counts: torch.Tensor,
    backend: Backend,
    dropout_keys: Callable[[Batch], list[int]],
    overlap: bool = True,
    loss_scale: float = 1.0,
    enter: Callable[[str], None] = UNPROFILED.enter,
) -> torch.Tensor:
    """Forward and backward of every micro-batch of a window; the gradients add up in the backend's bucket.

    Args:
        counts: positions of each term over the whole step and all ranks, as `Objective.count` gives them.
        dropout_keys: what names the stream of dropout of each row of a batch.
        overlap: let the exchange begin during the last backward.
        loss_scale: what the loss, and so every gradient, is multiplied by.
        enter: is given the name of each phase that begins.

    Returns:
        The sums of the terms in each micro-batch of this rank, without the scale, [M, T].
    """
    backend.zero_gradients()
    # Every term is linear in its scale, also where the objective writes the head's gradient by hand.
    scales = objective.scales(counts, backend.device) * loss_scale
    sums = scales.new_zeros(len(window), len(scales))
    with model.student.weight_cast_cache(), backend.computing():
        enter(phases.TEACHER)
        signals = teacher.signals(window, objective.teacher_spec)
        for number, (batch, teacher_signal) in enumerate(zip(window, signals, strict=True)):
            with backend.sync(number == len(window) - 1, overlap), keyed_by_row(dropout_keys(batch)):
                enter(phases.FORWARD)
                loss, sums[number] = objective(model, teacher_signal, batch, scales)
                enter(phases.BACKWARD)
                loss.backward()
                enter(phases.EXCHANGE)
            enter(phases.TEACHER)
    return sums


def train(run: Training) -> str:
    """Train from `run.state` to the end of the run, and say what ended it: epochs, steps, minutes, or its profile.

    The state is updated in place. Rank 0 saves.

    Raises:
        Diverged: `train.max_nonfinite` steps in a row had a loss or gradient that was not finite, `train.max_spike`
            had a loss above `train.max_loss_ratio` times that of the first step, or the run ends in one of these
            states or without any step that was taken. The checkpoints that may be ruined are set aside.
        Interrupted: a signal came that stops, on this rank or another one; the message says what is saved.
    """
    model, objective, batches, backend, state = run.model, run.objective, run.batches, run.backend, run.state
    settings, observer, enter = run.settings, run.observer, run.profile.enter
    steps = total_steps(settings, batches.steps_per_epoch)
    minutes = settings.minutes or float("inf")
    peak = peak_lr(run.optimizer_settings, batches.rows_per_step)
    own_bound = bound_of_rank(run.optimizer_settings, backend.size)
    since_log, log_waited, log_began = Tally(), 0.0, state.seconds
    if run.curve is not None:
        run.curve.begin(state)
    windows = batches.stream(state.step, steps, backend.device, run.teacher.read_ahead, run.profile.watch)
    over = state.step >= steps or state.seconds >= 60 * minutes
    due = False  # a checkpoint
    saves = backend.rank == 0 or run.checkpoints.by_all_ranks
    if state.step and (run.points.after(state.step, batches.steps_per_epoch) or over):
        # Interrupted between this point's checkpoint and the end of its evaluation.
        if reason := divergence(state, settings, over):
            raise _diverged(run, reason)
        _reach_point(run)
    ended_by = "epochs" if settings.epochs and steps == settings.epochs * batches.steps_per_epoch else "steps"
    window: list[Batch] = next(windows, [])
    counts = backend.sum(objective.count(window))
    loss_scale = state.loss_scale
    loss_scale.begin(model.student.precision == "fp16")
    clock = state.seconds  # of rank 0, the same on all ranks
    with handled() as signals, signals.deferred():
        signals.end_waiting()  # for one that came where Python drops errors, as in callbacks of its imports
        signals.on_usr1(settings.on_usr1 is OnUsr1.stop)
        while not over:
            began, syncs = time.monotonic(), backend.num_syncs
            # Where dropout is not keyed by row, one stream per step and rank: nothing to save, the same after a resume.
            torch.manual_seed(int(key(batches.seed, "dropout", state.step, backend.rank) >> 1))
            objective.begin_step(progress_of(state.step, steps, clock, minutes))
            parts = accumulate_gradients(
                model, run.teacher, objective, window, counts, backend,
                lambda batch: batches.dropout_keys(batch, state.step), own_bound is None, loss_scale.factor,
                enter,
            )  # fmt: skip
            if own_bound is not None:
                clip(model, own_bound * loss_scale.factor)
            enter(phases.DATA)
            waiting = time.monotonic()
            upcoming = next(windows, [])
            waited = time.monotonic() - waiting
            # One exchange a step, and all ranks decide alike: the losses, the counts of the next window, signals
            # and rank 0's clock ride along. (As float32 the counts are exact up to 16.7 M positions a step.)
            clock = state.seconds + time.monotonic() - began if backend.rank == 0 else 0.0
            own = [*objective.count(upcoming).tolist(), *signals.wishes(), clock]
            enter(phases.EXCHANGE)
            stats = backend.sum_gradients(torch.cat([parts.sum(0), parts.new_tensor(own)]))
            assert stats is not None
            enter(phases.OPTIMIZER)
            if loss_scale.factor != 1:
                backend.scale_gradients(1 / loss_scale.factor)
            gradient_norm = clip(model, run.optimizer_settings.clip)
            # The one place where a step waits for a GPU: whether all is finite is known from what is read anyway.
            with backend.reading():
                *reduced, norm = torch.cat([stats, gradient_norm.detach().to(stats).reshape(1)]).tolist()
            step_sums = objective.by_name(reduced[: parts.shape[1]])
            step_counts = objective.by_name(counts.tolist())
            next_counts = reduced[parts.shape[1] : -len(ALL) - 1]
            wishes, clock = reduced[-len(ALL) - 1 : -1], reduced[-1]
            stopped = signals.agreed_stop(wishes)
            wanted = wishes[ALL.index(SAVING)] > 0
            lr = peak * share(run.schedule, progress_of(state.step, steps, clock, minutes))
            loss_is_finite = math.isfinite(sum(step_sums.values()))
            finite = loss_is_finite and math.isfinite(norm)
            scaling = {} if loss_scale.value is None else {"loss_scale": loss_scale.value}
            overflow = loss_scale.update(loss_is_finite, finite)
            if finite:
                set_learning_rate(run.optimizer, lr)
                run.optimizer.step()

            enter(phases.OTHER)
            state.step += 1
            state.tokens += int(step_counts[TOKENS])
            state.seconds += time.monotonic() - began
            state.syncs += max(1, backend.num_syncs - syncs)
            state.overflows += overflow
            if not overflow:  # the scale falls to its level, which is no sign of divergence
                state.skipped += not finite
                state.skipped_in_a_row = 0 if finite else state.skipped_in_a_row + 1
            if not finite and not overflow:
                which = "loss" if not loss_is_finite else "gradient"
                rows = offending_rows(parts, window, backend)
                logger.warning(f"step {state.step} is skipped: its {which} is not finite, in {rows}")
            since_log.tokens += int(step_counts[TOKENS])
            log_waited += waited
            if finite:
                since_log.add(step_sums, step_counts, objective.weights)
                state.tally.add(step_sums, step_counts, objective.weights)
                if said := state.level.add(
                    state.step, step_sums, step_counts, objective.weights, settings.max_loss_ratio
                ):
                    logger.warning(f"step {state.step}: {said}")
            window, counts = upcoming, torch.tensor(next_counts, dtype=torch.float64)
            at_point = run.points.after(state.step, batches.steps_per_epoch)
            over = state.step >= steps or clock >= 60 * minutes
            diverged = divergence(state, settings, over)

            if state.step % settings.log_every == 0 or over or not finite:
                span = max(state.seconds - log_began, 1e-9)
                observer.log_metrics(
                    {
                        "step": state.step,
                        "epoch": state.step / batches.steps_per_epoch,
                        "tokens": state.tokens,
                        "seconds": state.seconds,
                        **{f"loss/{k}": v for k, v in since_log.means(objective.names).items()},
                        **objective.scheduled(),
                        "lr": lr,
                        "grad_norm": norm,
                        "tokens_per_second": since_log.tokens / span,
                        "data_wait": log_waited / span,
                        "skipped": state.skipped,
                        **{f"rows/{name}": fed.rows for name, fed in batches.sources_fed(state.step).items()},
                        **(scaling and scaling | {"overflows": state.overflows}),
                    }
                )
                since_log, log_waited, log_began = Tally(), 0.0, state.seconds
            if run.curve is not None and not diverged:
                enter(phases.EVALUATION)
                run.curve.after(state)
            enter(phases.CHECKPOINT)
            if run.milestones is not None and saves and not diverged:
                run.milestones.save(state)
            due = due or state.step % settings.save_every == 0 or at_point or over or wanted or stopped is not None
            saved = due and not state.skipped_in_a_row and not diverged  # else after the next step that is taken
            if saved:
                due = False
                if saves:  # rank 0 alone speaks of it
                    saved = run.checkpoints.save(state, model, run.optimizer)
            if wanted:
                logger.info(f"SIGUSR1 at step {state.step}, {_saved(saved)}")
            if diverged:
                raise _diverged(run, diverged)
            if stopped is not None:
                backend.barrier()  # the end of a rank ends the others, and rank 0 is still saving
                signals.received.clear()
                raise _interrupted(state, stopped, saved)
            enter(phases.EVALUATION)
            if at_point or over:
                backend.barrier()  # a signal may now end any rank, and with it the others: rank 0 has to have saved
                with signals.at_once():
                    _reach_point(run)
            if run.profile.end_step():
                return TRIAL
    return ended_by if state.step >= steps else "minutes"


@contextmanager
def saved_when_a_rank_is_lost(run: Training) -> Iterator[None]:
    """Rank 0 saves the last whole step of a training that has lost another rank: only the step under way is lost.

    It needs no other rank where each holds all weights; and nothing of the step under way, as weights and state change
    only after the last exchange of a step.
    """
    try:
        yield
    except RankLost:
        state, can_save = run.state, run.backend.rank == 0 and not run.checkpoints.by_all_ranks
        if can_save and state.step and not state.skipped_in_a_row:
            with handled() as signals, signals.postponed():  # this process ends anyway, by the loss
                run.checkpoints.save(state, run.model, run.optimizer)
        raise


def _reach_point(run: Training) -> None:
    losses = run.state.tally.means(run.objective.names)
    run.observer.at_point(run.state, run.state.step / run.batches.steps_per_epoch, losses)
    run.state.tally = Tally()


def divergence(state: State, settings: TrainConfig, over: bool) -> str:
    """Why a run is to end as one that has diverged; empty where it goes on or has ended well.

    Args:
        over: this is the end of the run.
    """
    if state.skipped_in_a_row and (over or state.skipped_in_a_row >= settings.max_nonfinite):
        return (
            f"loss or gradient was not finite in {state.skipped_in_a_row} steps in a row up to step {state.step} "
            f"(train.max_nonfinite={settings.max_nonfinite})"
        )
    if state.level.high_in_a_row and (over or state.level.high_in_a_row >= settings.max_spike):
        return (
            f"the loss has been more than {settings.max_loss_ratio} times that of the first step in "
            f"{state.level.high_in_a_row} steps in a row up to step {state.step} (train.max_loss_ratio, "
            f"train.max_spike={settings.max_spike})"
        )
    return "no step was taken: each of them overflowed" if over and state.step == state.overflows > 0 else ""


def _saved(saved: bool) -> str:
    return "its checkpoint is written" if saved else "which has ruined the weights or was skipped, so it is not saved"


def _interrupted(state: State, number: int, saved: bool) -> Interrupted:
    name = signal.Signals(number).name
    message = f"stopped by {name} at step {state.step}, {_saved(saved)}; the same command goes on from there"
    return Interrupted(message, number)


def _diverged(run: Training, reason: str) -> Diverged:
    """The error of a run that has diverged; rank 0 sets the checkpoints aside that may be ruined."""
    if run.backend.rank == 0:
        run.checkpoints.set_ruined_aside(run.state.level.sane_step)
    run.backend.barrier()
    newest = run.checkpoints.newest()
    return Diverged(
        f"{reason}; lower optimizer.lr or use precision=fp32. "
        + (f"The last good checkpoint is {newest}" if newest else "There is no good checkpoint")
        + "; later ones are kept as diverged-step-N"
    )
