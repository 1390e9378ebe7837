"""The loop: window, forward, backward, one sync, step; then log, save, evaluate."""

import math
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from distill.backends import Workers
from distill.checkpoint import Checkpoints, State
from distill.config import Optimizer, Schedule, Train
from distill.data.batches import Batch, Batches
from distill.errors import Diverged, Interrupted
from distill.kernels.precision import casts_kept
from distill.objective.objective import TERMS, Objective
from distill.optim import clip, factor, set_learning_rate
from distill.seed import key

ENDLESS = 10**9  # steps of a run that only the clock ends

# Called with the state, the number of epochs done, and the mean losses since the epoch began.
EndOfEpoch = Callable[[State, float, dict[str, float]], None]


def plan(settings: Train, steps_per_epoch: int) -> int:
    """The number of steps after which the run ends, wall-clock aside: the first limit that is reached."""
    limits = []
    if settings.epochs is not None:
        limits.append(settings.epochs * steps_per_epoch)
    if settings.steps is not None:
        limits.append(settings.steps)
    return min(limits, default=ENDLESS)


def losses_by_name(objective: Objective, sums: torch.Tensor, counts: torch.Tensor) -> dict[str, float]:
    """Total and mean of every term that has a weight; nan without positions, as when all steps were skipped."""
    named = {"total": float(objective.total(sums, counts)) if counts.any() else math.nan}
    for index, name in enumerate(TERMS):
        if objective.weights[index] > 0:
            named[name] = float(sums[index] / counts[index])
    return named


def train(
    student: Any,
    teacher: Any | None,
    batches: Batches,
    objective: Objective,
    optimizer: torch.optim.Optimizer,
    backend: Workers,
    state: State,
    settings: Train,
    schedule: Schedule,
    peak: Optimizer,
    checkpoints: Checkpoints,
    log: Callable[[dict[str, float]], None],
    end_of_epoch: EndOfEpoch,
) -> str:
    """Train from `state` to the end of the run, and say what ended it: epochs, steps or minutes.

    `state` is updated in place. Rank 0 saves; `log` gets the metrics of every `log_every`-th step; `end_of_epoch` is
    called at the end of each epoch and of the run, and once more for the same step after a resume from there.

    Raises:
        Diverged: `train.max_nonfinite` steps in a row had a loss or gradient that was not finite.
        Interrupted: SIGINT or SIGTERM; the checkpoint is written.
    """
    steps = plan(settings, batches.steps_per_epoch)
    minutes = settings.minutes or float("inf")
    log_sums, log_counts = torch.zeros(2, 3, dtype=torch.float64)
    log_tokens, log_waited, log_began = 0, 0.0, state.seconds
    windows = batches.stream(state.step, steps, backend.device)
    over = state.step >= steps or state.seconds >= 60 * minutes
    if state.step and (state.step % batches.steps_per_epoch == 0 or over):
        # Interrupted between this epoch's checkpoint and the end of its evaluation.
        _close_epoch(state, objective, batches.steps_per_epoch, end_of_epoch)
    ended_by = "epochs" if settings.epochs and steps == settings.epochs * batches.steps_per_epoch else "steps"
    window: list[Batch] = next(windows, [])
    counts = backend.sum(objective.counts(window))
    with _stopping() as stop_signal:
        while not over:
            began = time.monotonic()
            # One stream of dropout per step and rank: nothing to save, the same after a resume.
            torch.manual_seed(int(key(batches.seed, "dropout", state.step, backend.rank) >> 1))
            sums, syncs = torch.zeros(3, device=backend.device), backend.num_syncs
            backend.zero_gradients()
            with casts_kept(backend.device):
                for number, (batch, taught) in enumerate(objective.ask(teacher, window)):
                    with backend.sync(last=number == len(window) - 1):
                        loss, parts = objective(student, teacher, batch, counts, taught)
                        loss.backward()
                    sums += parts
            asked = time.monotonic()
            upcoming = next(windows, [])
            waited = time.monotonic() - asked
            # One exchange a step, and all ranks decide alike: the losses, the counts of the next window, a wish to stop
            # and rank 0's clock ride along. (As float32 the counts are exact up to 16.7 M positions a step.)
            clock = state.seconds + time.monotonic() - began if backend.rank == 0 else 0.0
            own = [*objective.counts(upcoming).tolist(), float(stop_signal()), clock]
            riders = backend.sum_gradients(torch.cat([sums, sums.new_tensor(own)]))
            assert riders is not None
            norm = clip(student, peak.clip)
            told = riders.tolist()
            *_, stopped, clock = told
            progress = max((state.step + 0.5) / steps, clock / (60 * minutes))
            lr = peak.lr * factor(schedule, min(progress, 1.0))
            finite = math.isfinite(sum(told[:3])) and math.isfinite(float(norm))
            if finite:
                set_learning_rate(optimizer, lr)
                optimizer.step()
            sums = torch.tensor(told[:3], dtype=torch.float64)
            elapsed = time.monotonic() - began

            state.step += 1
            state.tokens += int(counts[2])
            state.seconds += elapsed
            state.syncs += max(1, backend.num_syncs - syncs)
            state.skipped += not finite
            state.skipped_in_a_row = 0 if finite else state.skipped_in_a_row + 1
            if finite:
                log_sums, log_counts = log_sums + sums, log_counts + counts
                state.epoch_sums = (torch.tensor(state.epoch_sums, dtype=torch.float64) + sums).tolist()
                state.epoch_counts = (torch.tensor(state.epoch_counts, dtype=torch.float64) + counts).tolist()
            log_tokens, log_waited = log_tokens + int(counts[2]), log_waited + waited
            window, counts = upcoming, torch.tensor(told[3:6], dtype=torch.float64)
            ends_epoch = state.step % batches.steps_per_epoch == 0
            over = state.step >= steps or clock >= 60 * minutes
            diverged = state.skipped_in_a_row >= settings.max_nonfinite

            if state.step % settings.log_every == 0 or over or not finite:
                span = max(state.seconds - log_began, 1e-9)
                log(
                    {
                        "step": state.step,
                        "epoch": state.step / batches.steps_per_epoch,
                        "tokens": state.tokens,
                        "seconds": state.seconds,
                        **{f"loss/{k}": v for k, v in losses_by_name(objective, log_sums, log_counts).items()},
                        "lr": lr,
                        "grad_norm": float(norm),
                        "tokens_per_second": log_tokens / span,
                        "data_wait": log_waited / span,
                        "skipped": state.skipped,
                    }
                )
                log_sums, log_counts = torch.zeros(2, 3, dtype=torch.float64)
                log_tokens, log_waited, log_began = 0, 0.0, state.seconds
            due = state.step % settings.save_every == 0 or ends_epoch or over or stopped or diverged
            if due and backend.rank == 0:
                checkpoints.save(state, student, optimizer)
            if diverged:
                raise Diverged(_diverged(state, settings, checkpoints))
            if stopped:
                raise _interrupted(state, stop_signal())
            if ends_epoch or over:
                _close_epoch(state, objective, batches.steps_per_epoch, end_of_epoch)
        if backend.sum(torch.tensor(stop_signal())):  # during the last evaluation
            raise _interrupted(state, stop_signal())
    return ended_by if state.step >= steps else "minutes"


def _close_epoch(state: State, objective: Objective, steps_per_epoch: int, end_of_epoch: EndOfEpoch) -> None:
    sums, counts = (torch.tensor(values, dtype=torch.float64) for values in (state.epoch_sums, state.epoch_counts))
    end_of_epoch(state, state.step / steps_per_epoch, losses_by_name(objective, sums, counts))
    state.epoch_sums, state.epoch_counts = [0.0] * 3, [0.0] * 3


def _interrupted(state: State, number: int) -> Interrupted:
    """`number` is 0 where another rank was the one to be asked."""
    message = f"stopped at step {state.step}; the same command goes on from there"
    return Interrupted(message, number or signal.SIGTERM)


def _diverged(state: State, settings: Train, checkpoints: Checkpoints) -> str:
    newest = checkpoints.newest()
    return (
        f"loss or gradient was not finite in {state.skipped_in_a_row} steps in a row up to step {state.step} "
        f"(train.max_nonfinite={settings.max_nonfinite}); lower optimizer.lr or use precision fp32. "
        + (f"The last good checkpoint is {newest}" if newest else "There is no checkpoint yet")
    )


@contextmanager
def _stopping() -> Iterator[Callable[[], int]]:
    """Let the step under way finish when asked to stop; gives a function that says which signal came, or 0."""
    received: list[int] = []
    names = (signal.SIGINT, signal.SIGTERM)
    try:
        old = {name: signal.signal(name, lambda number, _: received.append(number)) for name in names}
    except ValueError:  # not in the main thread, as in some tests: signals are somebody else's
        old = {}
    try:
        yield lambda: received[0] if received else 0
    finally:
        for name, handler in old.items():
            signal.signal(name, handler)
