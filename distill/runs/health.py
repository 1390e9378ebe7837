"""The health of a training: steps that are not finite, the loss scale, spikes of the loss, and divergence."""

import logging
from dataclasses import replace

from distill.config.settings import TrainConfig
from distill.data.batch import Batch
from distill.distributed import Ranks
from distill.runs.checkpoint import Checkpoints, State
from distill.runs.divergence import offending_sequences
from distill.runs.step import StepResult
from distill.runtime.errors import Diverged
from distill.runtime.progress import counted

logger = logging.getLogger(__name__)


class Health:
    """Watches each step of a training, the same on all ranks. What it counts is part of the state."""

    def __init__(self, settings: TrainConfig, ranks: Ranks, checkpoints: Checkpoints) -> None:
        self.settings, self.ranks, self.checkpoints = settings, ranks, checkpoints

    def after_step(self, state: State, result: StepResult, batches: list[Batch]) -> StepResult:
        """Count a skipped step, follow the loss, adapt the loss scale; all ranks call it together.

        Args:
            batches: this rank's micro-batches of the step.

        Returns:
            The result, with the reason where the run has diverged.
        """
        overflow = state.loss_scale.update(result.loss_is_finite, result.finite)
        state.count_outcome(result.finite, overflow)
        if result.finite:
            state.tally.add(result.sums, result.counts, result.weights)
            limit = self.settings.max_loss_ratio
            if warning := state.level.add(state.step, result.sums, result.counts, result.weights, limit):
                logger.warning(f"step {state.step}: {warning}")
        elif not overflow:
            which = "gradient" if result.loss_is_finite else "loss"
            sequences = offending_sequences(result.rank_sums, batches, self.ranks)
            logger.warning(f"step {state.step} is skipped: its {which} is not finite, in {sequences}")
        return replace(result, diverged=self._reason(state, result.over))

    def check(self, state: State, over: bool) -> None:
        """Raise Diverged where the run has diverged; rank 0 renames the checkpoints that may have diverged.

        Args:
            over: this is the end of the run.
        """
        if not (reason := self._reason(state, over)):
            return
        if self.ranks.rank == 0:
            self.checkpoints.rename_diverged(state.level.sane_step)
        self.ranks.barrier()
        newest = self.checkpoints.newest()
        raise Diverged(
            f"{reason}; lower optimizer.lr in another folder (hydra.run.dir=DIR), or resume here with precision=fp32. "
            + (f"The last good checkpoint is {newest}" if newest else "There is no good checkpoint")
            + "; checkpoints that may have diverged are renamed to diverged-step-N"
        )

    def _reason(self, state: State, over: bool) -> str:
        """Why the run ends as one that has diverged; empty where it continues or ends well."""
        settings, skipped, high = self.settings, state.skipped_in_a_row, state.level.high_in_a_row
        if skipped and (over or skipped >= settings.max_nonfinite):
            return (
                f"loss or gradient was not finite in {counted(skipped, 'step')} in a row up to step {state.step} "
                f"(train.max_nonfinite={settings.max_nonfinite})"
            )
        if high and (over or high >= settings.max_spike):
            return (
                f"the loss has been more than {settings.max_loss_ratio} times that of the first step in "
                f"{counted(high, 'step')} in a row up to step {state.step} (train.max_loss_ratio, "
                f"train.max_spike={settings.max_spike})"
            )
        return "no step was taken: each of them overflowed" if over and state.step == state.overflows > 0 else ""
