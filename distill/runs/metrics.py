"""The metrics of a training: what every `log_every`-th step leaves in metrics.jsonl and trackers."""

import logging
import time
from typing import Self

from distill.data.batches import Batches
from distill.objective.objective import Objective
from distill.objective.running_mean import TOKENS, RunningMean
from distill.optim.schedule import ENDLESS, Limits
from distill.runs.checkpoint import State
from distill.runs.record import Record
from distill.runs.run_folder import RunFolder
from distill.runs.step import Follower, StepResult
from distill.runs.trackers import Tracker
from distill.runtime.errors import Interrupted
from distill.runtime.progress import Progress, duration

FIRST_MINUTE = 60.0  # seconds of typical steps, after which the time to the end is logged once
UNTYPICAL_STEPS = 2  # at the start: they compile, or touch their memory for the first time

logger = logging.getLogger(__name__)


class RunLog:
    """Writes lines of metrics to metrics.jsonl and the tracker, and the progress line; rank 0 does."""

    def __init__(self, folder: RunFolder, tracker: Tracker, state: State, limits: Limits) -> None:
        """`state`: where the training begins; `limits`: what ends the run."""
        self.folder, self.tracker, self.first_step = folder, tracker, state.step
        total, self._seconds = 0 if limits.steps == ENDLESS else limits.steps, 60 * limits.minutes
        self.progress = Progress("training", total, "steps", start=state.step, limit=self._seconds - state.seconds)
        self._typical, self._typical_since = False, 0.0  # whether the last steps were as fast as those to come
        self._has_logged_the_end = False

    def log_metrics(self, metrics: dict[str, float]) -> None:
        if not self.folder.writes:
            return
        self.folder.metrics.append(metrics)
        self.tracker.log_metrics(metrics, int(metrics["step"]))
        note = f"loss {metrics['loss/total']:.4f}, {metrics['tokens_per_second']:,.0f} tokens/s"
        self.progress.end_in(self._seconds - metrics["seconds"])  # train.minutes leaves out evaluations
        self.progress.update(metrics["step"], note)
        if not self._typical:
            self.progress.begin_rate()
            self._typical = metrics["step"] - self.first_step > UNTYPICAL_STEPS
            self._typical_since = metrics["seconds"]
        elif not self._has_logged_the_end and metrics["seconds"] - self._typical_since >= FIRST_MINUTE:
            self._log_the_end(metrics)

    def _log_the_end(self, metrics: dict[str, float]) -> None:
        """Log how long the training will take, by the rate of its first minute; compilation is none of it."""
        self._has_logged_the_end = True
        left = self.progress.seconds_left
        if left:
            rate, end = metrics["tokens_per_second"], time.strftime("%H:%M", time.localtime(time.time() + left))
            logger.info(f"at {rate:,.0f} tokens a second the training ends in about {duration(left)}, at {end}")

    def log_scores(self, record: Record, step: int) -> None:
        """The scores of teacher and baseline, which have none on the way, beside the student's; on rank 0."""
        models = {name: model for name, model in record.models().items() if name != "student"}
        scores = {
            f"{name}/{measure}": values for name, model in models.items() for measure, values in model.scores.items()
        }
        self.tracker.log_metrics(
            {f"{key}/{data}": value for key, of in scores.items() for data, value in of.items()}, step
        )

    def end_training(self) -> None:
        """The training has ended, and scoring begins."""
        self.progress.close()

    def close(self, failed: bool = False) -> None:
        """The run has ended; `failed`: by an error. A second call does nothing."""
        self.progress.close()
        self.tracker.close(failed)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        # One that a signal ends has not failed: its command continues it.
        self.close(error is not None and not isinstance(error, Interrupted))


class Metrics(Follower):
    """Hands a line of metrics to `log` after every so many steps, and after the last one, also of this start."""

    def __init__(self, objective: Objective, batches: Batches, every: int, log: RunLog, state: State) -> None:
        """`every`: steps; `state`: where the training begins."""
        self.objective, self.batches, self.every, self.log = objective, batches, every, log
        self._losses, self._waited, self._began = RunningMean(), 0.0, state.seconds

    def after_step(self, state: State, result: StepResult) -> None:
        self._losses.tokens += int(result.counts[TOKENS])  # also of a step that is skipped
        self._waited += result.data_wait
        if result.finite:
            self._losses.add(result.sums, result.counts, result.weights)
        if state.step % self.every == 0 or result.over or result.stop is not None or not result.finite:
            self.log.log_metrics(self._line(state, result))
            self._losses, self._waited, self._began = RunningMean(), 0.0, state.seconds

    def _line(self, state: State, result: StepResult) -> dict[str, float]:
        span = max(state.seconds - self._began, 1e-9)
        line = {
            "step": state.step,
            "epoch": state.step / self.batches.steps_per_epoch,
            "tokens": state.tokens,
            "seconds": state.seconds,
            **{f"loss/{name}": mean for name, mean in self._losses.means(self.objective.names).items()},
            **self.objective.scheduled(),
            "lr": result.lr,
            "grad_norm": result.norm,
            "tokens_per_second": self._losses.tokens / span,
            "data_wait": self._waited / span,
            "skipped": state.skipped,
            **{f"sequences/{name}": fed.sequences for name, fed in self.batches.sources_fed(state.step).items()},
        }
        if result.loss_scale is not None:
            line |= {"loss_scale": result.loss_scale, "overflows": state.overflows}
        return line
