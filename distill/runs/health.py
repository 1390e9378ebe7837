"""The health of a training: steps that are not finite, the loss scale, spikes of the loss, and divergence."""

import logging
from dataclasses import replace

from distill.config.settings import PrecisionConfig, TrainConfig
from distill.data.batch import Batch
from distill.distributed import Ranks
from distill.objective.objective import Objective
from distill.runs.checkpoint import Checkpoints, State
from distill.runs.divergence import offending_sequences, teacher_is_finite
from distill.runs.step import StepResult
from distill.runtime.errors import Diverged
from distill.runtime.progress import counted
from distill.teacher.output import Teacher

logger = logging.getLogger(__name__)


class Health:
    """Watches each step of a training, the same on all ranks. What it counts is part of the state."""

    def __init__(
        self,
        settings: TrainConfig,
        precision: PrecisionConfig,
        ranks: Ranks,
        checkpoints: Checkpoints,
        teacher: Teacher,
        objective: Objective,
    ) -> None:
        """`precision`, `teacher` and `objective` are there to find out why a step is not finite."""
        self.settings, self.precision, self.ranks, self.checkpoints = settings, precision, ranks, checkpoints
        self.teacher, self.objective = teacher, objective
        self.teacher_is_finite = True  # in the last step whose loss was not

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
            self.teacher_is_finite = result.loss_is_finite or teacher_is_finite(
                self.teacher, self.objective, batches, self.ranks
            )
            cause = "" if self.teacher_is_finite else ", as the teacher's own outputs are not"
            logger.warning(f"step {state.step} is skipped: its {which} is not finite, in {sequences}{cause}")
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
            f"{reason}; {self._cure(state)}. "
            + (f"The last good checkpoint is {newest}" if newest else "There is no good checkpoint")
            + "; checkpoints that may have diverged are renamed to diverged-step-N"
        )

    def _cure(self, state: State) -> str:
        """What helps, by what was found to be at fault."""
        formats, another = self.precision, "in another folder (hydra.run.dir=DIR)"
        if state.skipped_in_a_row and not self.teacher_is_finite:
            at_fault = "the teacher's own logits or hidden states are not finite, and the student is not at fault"
            if formats.teacher != "fp32":
                return f"{at_fault}: resume here with precision.teacher=fp32"
            return f"{at_fault}: take another teacher, or leave out the sequences that the warnings name, {another}"
        resume = "resume here with precision=fp32"
        if state.step == state.skipped:  # no update was made
            cause = "this began before any update, so that the learning rate is not at fault"
            cure = f"check where the student starts, its data and the losses, {another}"
            return f"{cause}: " + (cure if formats.student == "fp32" else resume)
        lower = f"lower optimizer.lr {another}"
        return lower if formats.student == "fp32" else f"{lower}, or {resume}"

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
