"""What a training has done so far, as its checkpoints keep it: steps, skipped steps, and spikes of the loss."""

from dataclasses import dataclass, field
from typing import Any

from distill.objective.running_mean import RunningMean
from distill.optim.loss_scale import LossScale
from distill.runtime.progress import counted

# What the first loss of a term counts as at least: some start where they lose next to nothing, as a student that is a
# copy of its teacher does, and lose more than three times that ever after.
LEAST_FIRST = 1.0
MEMORY = 0.9  # how much of the running mean stays in each step: it spans about ten of them


@dataclass
class State:
    """What a run has done so far. Everything random is a function of seed and step, so no generator is kept."""

    step: int = 0
    tokens: int = 0  # positions seen, padding not counted, all ranks
    seconds: float = 0.0  # of training; evaluation and saving not counted
    skipped: int = 0  # steps whose loss or gradient was not finite
    skipped_in_a_row: int = 0
    losses: RunningMean = field(default_factory=RunningMean)  # of the terms, since the last evaluation
    overflows: int = 0  # further steps left out, whose gradient overflowed by the loss scale
    loss_scale: LossScale = field(default_factory=LossScale)
    first_losses: dict[str, float] = field(default_factory=dict)  # each term's mean in the first step that had any
    running_mean: float = 0.0  # of the loss, as a multiple of the first step's
    spike_steps: int = 0  # since the running mean passed `train.max_loss_ratio`
    # The last step outside of a spike whose own loss was below the limit, too. A loss is that of the weights before its
    # step, so that a checkpoint of an earlier step is known to be good, and that of this step is not.
    last_good_step: int = 0

    @classmethod
    def of(cls, stored: dict[str, Any]) -> "State":
        """The state that a checkpoint holds, as `asdict` has given it."""
        parts = {"losses": RunningMean(**stored["losses"]), "loss_scale": LossScale(**stored["loss_scale"])}
        return cls(**stored | parts)

    def add(self, tokens: int, seconds: float) -> None:
        """Take in a step, also one that is skipped."""
        self.step += 1
        self.tokens += tokens
        self.seconds += seconds

    def begin_interval(self) -> None:
        """Forget the losses up to an evaluation, which has reported them."""
        self.losses = RunningMean()

    def begin_start(self) -> None:
        """Count skipped steps in a row anew: a run that has diverged gets as many tries again when it is resumed."""
        self.skipped_in_a_row = 0

    def take(
        self, sums: dict[str, float], counts: dict[str, float], weights: dict[str, float], limit: float | None
    ) -> str | None:
        """Take in the losses of a step that changed the weights; by their running mean a spike begins and ends.

        Losses are compared as multiples of the first step's under the weights in force, so that a weight which rises
        along the run is not taken for a loss that does. A mean of several steps stands for the loss, because a batch of
        few sequences can lose several times the usual amount.

        Args:
            sums, counts: of each term over the step and all ranks.
            weights: of the terms in this step.
            limit: the largest multiple that is no spike; None: any.

        Returns:
            A warning in the first step of a spike, and in the one after it; else None.
        """
        self.skipped_in_a_row = 0
        self.losses.add(sums, counts, weights)
        means = {name: value / counts[name] for name, value in sums.items() if counts.get(name)}
        self.first_losses = means | self.first_losses
        usual = sum(abs(weights[name]) * max(abs(self.first_losses[name]), LEAST_FIRST) for name in means)
        ratio = 0.0
        if usual:
            ratio = max(0.0, sum(weights[name] * mean for name, mean in means.items()) / usual)
            self.running_mean = MEMORY * self.running_mean + (1 - MEMORY) * ratio if self.running_mean else ratio
        before, is_spike = self.spike_steps, limit is not None and self.running_mean > limit
        self.spike_steps = before + 1 if is_spike else 0
        if not is_spike and (limit is None or ratio <= limit):
            self.last_good_step = self.step
        if is_spike == bool(before):
            return None
        times = f"{self.running_mean:.3g} times that of the first step"
        if before:
            return f"the loss has come back to {times}, after {counted(before, 'step')}"
        return f"the loss is {times} (train.max_loss_ratio={limit}); until it comes back, no checkpoint counts as good"
