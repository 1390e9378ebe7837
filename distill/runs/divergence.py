"""Finds out whether a training has diverged: by steps that are not finite, spikes of the loss, weights and scores."""

import logging
import math

import torch

from distill.data.batch import Batch
from distill.distributed import Ranks
from distill.runs.checkpoint import weights_are_finite
from distill.runs.run import Run
from distill.runs.state import State
from distill.runs.step import StepResult
from distill.runtime.errors import Diverged
from distill.runtime.progress import counted
from distill.teacher.output import Teacher, is_finite

PERPLEXITIES = ("perplexity", "pseudo_perplexity")
NAMED_SEQUENCES = 8  # of each rank, where a loss is not finite

logger = logging.getLogger(__name__)


class DivergenceCheck:
    """Watches each step of a training, the same on all ranks. What it counts is part of the state."""

    def __init__(self, run: Run, teacher: Teacher) -> None:
        self.run, self.teacher, self.settings = run, teacher, run.config.train
        self.teacher_is_finite = True  # in the last step whose loss was not

    def after_step(self, state: State, result: StepResult) -> str:
        """Count a skipped step, follow the loss, adapt the loss scale; all ranks call it together.

        Returns:
            Why the run has diverged; empty where it has not.
        """
        overflow = state.loss_scale.update(result.loss_is_finite, math.isfinite(result.grad_norm))
        if overflow:  # the loss scale falls to its level, which is no sign of divergence
            state.overflows += 1
        elif result.skipped:
            state.skipped += 1
            state.skipped_in_a_row += 1
            self._warn_of_skipped(state, result)
        elif warning := state.take(result.sums, result.counts, result.weights, self.settings.max_loss_ratio):
            logger.warning(f"step {state.step}: {warning}")
        return self._reason(state, result.over)

    def check(self, state: State, over: bool) -> None:
        """Raise Diverged where the run has diverged; rank 0 renames the checkpoints that may have diverged.

        Args:
            over: this is the end of the run.
        """
        if not (reason := self._reason(state, over)):
            return
        checkpoints, ranks = self.run.folder.checkpoints, self.run.ranks
        if ranks.rank == 0:
            checkpoints.rename_diverged(state.last_good_step)
        ranks.barrier()
        newest = checkpoints.newest()
        raise Diverged(
            f"{reason}; {self._cure(state)}. "
            + (f"The last good checkpoint is {newest}" if newest else "There is no good checkpoint")
            + "; checkpoints that may have diverged are renamed to diverged-step-N"
        )

    @torch.no_grad()
    def _warn_of_skipped(self, state: State, result: StepResult) -> None:
        which, self.teacher_is_finite = "gradient", True
        if not result.loss_is_finite:  # the teacher's outputs for the step are computed once more
            with self.run.ranks.computing():
                outputs = self.teacher.outputs(result.batches, self.run.objective.teacher_spec)
                finite = all([is_finite(output) for output in outputs])
            which, self.teacher_is_finite = "loss", not float(self.run.ranks.sum(torch.tensor(float(not finite))))
        sequences = offending_sequences(result.rank_sums, result.batches, self.run.ranks)
        cause = "" if self.teacher_is_finite else ", as the teacher's own outputs are not"
        logger.warning(f"step {state.step} is skipped: its {which} is not finite, in {sequences}{cause}")

    def _reason(self, state: State, over: bool) -> str:
        """Why the run ends as one that has diverged; empty where it continues or ends well."""
        settings, skipped, spike = self.settings, state.skipped_in_a_row, state.spike_steps
        if skipped and (over or skipped >= settings.max_nonfinite):
            return (
                f"loss or gradient was not finite in {counted(skipped, 'step')} in a row up to step {state.step} "
                f"(train.max_nonfinite={settings.max_nonfinite})"
            )
        if spike and (over or spike >= settings.max_spike):
            return (
                f"the loss has been more than {settings.max_loss_ratio} times that of the first step in "
                f"{counted(spike, 'step')} in a row up to step {state.step} (train.max_loss_ratio, "
                f"train.max_spike={settings.max_spike})"
            )
        return "no step was taken: each of them overflowed" if over and state.step == state.overflows > 0 else ""

    def _cure(self, state: State) -> str:
        """What helps, by what was found to be at fault."""
        formats, another = self.run.config.precision, "in another folder (hydra.run.dir=DIR)"
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


def offending_sequences(rank_sums: torch.Tensor, window: list[Batch], ranks: Ranks) -> str:
    """Name the sequences of the micro-batches whose loss is not finite; of all of them where every loss is.

    All ranks call it together, for a step that none of them takes.

    Args:
        rank_sums: sums of the terms in each micro-batch of this rank, [M, T].
    """
    good = rank_sums.isfinite().all(dim=1).tolist()
    all_good = not float(ranks.sum(torch.tensor(float(not all(good)))))
    named = [int(one) for batch, is_good in zip(window, good, strict=True) if all_good or not is_good
             for one in batch.row_ids]  # fmt: skip
    descriptions = []
    for rank, indices in enumerate(ranks.gather(named)):
        if indices:
            more = f" and {len(indices) - NAMED_SEQUENCES} more" if len(indices) > NAMED_SEQUENCES else ""
            shown = ", ".join(map(str, indices[:NAMED_SEQUENCES])) + more
            descriptions.append(shown + (f" of rank {rank}" if ranks.size > 1 else ""))
    return "sequences " + "; ".join(descriptions) if descriptions else "no sequence"


def refuse_diverged(run: Run, state: State, scores: dict[str, dict[str, float | None]]) -> None:
    """Raises Diverged where the trained student's weights or scores have diverged, so that nothing is published.

    The checkpoints that may have diverged are renamed, so that the same command resumes from one before them.
    """
    reasons = diverged_scores(scores, len(run.pair.tokenizer), run.config.train.max_loss_ratio)
    finite = weights_are_finite(dict(run.pair.student.named_parameters()))
    if float(run.ranks.sum(torch.tensor(float(not finite)))):
        reasons = ["weights that are not finite"]
    if not reasons:
        return
    if run.folder.writes:
        run.folder.checkpoints.rename_diverged(state.last_good_step)
    raise Diverged(
        f"the student has diverged ({', '.join(reasons)}), so it is not published; lower optimizer.lr, in another "
        "folder (hydra.run.dir=DIR)"
    )


def diverged_scores(scores: dict[str, dict[str, float | None]], vocabulary: int, limit: float | None) -> list[str]:
    """The scores that no student has that learned anything, as `measure on set = value`.

    That is one that is no number, and a perplexity whose logarithm is more than `limit` times that of guessing, which
    is the size of the vocabulary: the last steps of a run have no later loss that would show what they did.

    Args:
        scores: by measure, then by set; None where they come from a file of JSON, which has no other word for them.
        limit: `train.max_loss_ratio`; None: any finite score will do.
    """
    most = math.inf if limit is None else limit * math.log(max(vocabulary, 2))
    return [
        f"{measure} on {name} = {'no number' if value is None else value}"
        for measure, by_set in scores.items()
        for name, value in by_set.items()
        if value is None or not math.isfinite(value) or (measure in PERPLEXITIES and math.log(max(value, 1.0)) > most)
    ]
