"""Snapshots: the student after chosen steps as a folder that other programs load, which no pruning removes."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from distill.config.settings import TrainConfig
from distill.runs.checkpoint import State
from distill.runs.checkpoint_files import STEP
from distill.runs.profile.phases import CHECKPOINT, phase
from distill.runs.step import Follower, StepResult
from distill.runtime.errors import SettingError

MOST_NAMED = 5  # steps in a line

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Snapshots(Follower):
    """The folders `step-N` in `folder`, for the steps `steps` and every multiple of `every`.

    `write`, which all ranks call, makes one: it gets the folder, which has to appear whole or not at all, and what the
    run has done so far. It leaves one that is there as it is.
    """

    folder: Path
    steps: frozenset[int]
    every: int | None
    write: Callable[[Path, State], None]

    def after_step(self, state: State, result: StepResult) -> None:
        """Write the student where there is a snapshot after this step, and none yet from before an interruption.

        It comes before the step's checkpoint: a run that resumes from there has the snapshot, and one that was killed
        in between comes to this step again.
        """
        due = state.step in self.steps or (self.every is not None and state.step % self.every == 0)
        if due and not result.diverged:
            with phase(CHECKPOINT):
                self.write(self.folder / f"step-{state.step}", state)

    def warn_of_past(self, step: int) -> None:
        """Log the steps of snapshots that a run which goes on from this step will not keep any more."""
        wanted = {*self.steps, *(range(self.every, step + 1, self.every) if self.every is not None else ())}
        if past := sorted(one for one in wanted - {*self.kept()} if one <= step):
            more = f" and {len(past) - MOST_NAMED} more" if len(past) > MOST_NAMED else ""
            logger.warning(
                f"train.{'snapshots' if past[0] in self.steps else 'snapshot_every'} asks for a snapshot of step "
                f"{', '.join(map(str, past[:MOST_NAMED]))}{more}, but the run resumes after step {step}: to get it, "
                "start another run (hydra.run.dir=DIR)"
            )

    def kept(self) -> list[int]:
        """The steps of all that are there, in their order."""
        matches = [STEP.fullmatch(path.name) for path in self.folder.glob("step-*") if path.is_dir()]
        return sorted(int(match[1]) for match in matches if match)


def check_within(settings: TrainConfig, steps: int) -> None:
    """Refuse snapshots that a run of so many steps never reaches.

    Raises:
        SettingError: naming the first of them.
    """
    cure = f"but the run ends after step {steps}: leave it out, or make the run longer (train.epochs, train.steps)"
    if late := [step for step in settings.snapshots or [] if step > steps]:
        raise SettingError(f"train.snapshots={settings.snapshots} has step {late[0]}, {cure}")
    if settings.snapshot_every is not None and settings.snapshot_every > steps:
        raise SettingError(f"train.snapshot_every={settings.snapshot_every} is never reached, {cure}")
