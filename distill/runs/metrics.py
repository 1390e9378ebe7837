"""The metrics of a training: what every `log_every`-th step leaves in metrics.jsonl, trackers and the live page."""

from typing import Protocol

from distill.data.batches import Batches
from distill.objective.objective import Objective
from distill.objective.tally import TOKENS, Tally
from distill.runs.checkpoint import State
from distill.runs.step import StepResult


class MetricsLog(Protocol):
    """Where the metrics go."""

    def log_metrics(self, metrics: dict[str, float]) -> None: ...


class Metrics:
    """An observer that hands a line of metrics to `log` after every so many steps, and after the last one."""

    def __init__(self, objective: Objective, batches: Batches, every: int, log: MetricsLog, state: State) -> None:
        """`every`: steps; `state`: where the training begins."""
        self.objective, self.batches, self.every, self.log = objective, batches, every, log
        self._losses, self._waited, self._began = Tally(), 0.0, state.seconds

    def after_step(self, state: State, result: StepResult) -> None:
        self._losses.tokens += int(result.counts[TOKENS])
        self._waited += result.waited
        if result.finite:
            self._losses.add(result.sums, result.counts, result.weights)
        if state.step % self.every == 0 or result.over or not result.finite:
            self.log.log_metrics(self._line(state, result))
            self._losses, self._waited, self._began = Tally(), 0.0, state.seconds

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
            **{f"rows/{name}": fed.rows for name, fed in self.batches.sources_fed(state.step).items()},
        }
        if result.loss_scale is not None:
            line |= {"loss_scale": result.loss_scale, "overflows": state.overflows}
        return line
