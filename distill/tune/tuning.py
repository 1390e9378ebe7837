"""The procedure: profile the run as it is, try changes in turns, then those that helped together."""

import logging
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import yaml

from distill.runtime.errors import SettingError
from distill.tune.candidate import Candidate
from distill.tune.candidates import PROPOSALS, candidates
from distill.tune.trial import Outcome, run_trial

KINDS = ("rules", *PROPOSALS)
HELPS = 1.03  # times as fast: less is lost in the noise of trials this short
BASE, TOGETHER = "as it is", "together"

logger = logging.getLogger(__name__)


@dataclass
class Plan:
    """What is to be tried.

    Attributes:
        arguments: of the run that is tuned.
        folder: where trials and the table go.
        steps: of a trial.
        turns: how often each change is tried, after the run as it is.
        kinds: of changes (`KINDS`).
    """

    arguments: list[str]
    folder: Path
    steps: int = 40
    turns: int = 2
    kinds: tuple[str, ...] = KINDS


@dataclass
class Tried:
    """A change with all of its trials, each beside the trial of the run as it is in the same turn."""

    candidate: Candidate
    outcomes: list[Outcome] = field(default_factory=list)
    gains: list[float] = field(default_factory=list)
    loss_difference: float = 0.0  # the largest, as a share of the loss of the run as it is

    @property
    def measured(self) -> float | None:
        """How many times as fast it was: the median of the turns."""
        return median(self.gains) if self.gains else None

    @property
    def error(self) -> str:
        return next((outcome.error for outcome in self.outcomes if outcome.error), "")

    @property
    def seconds(self) -> float | None:
        known = [outcome.seconds for outcome in self.outcomes if outcome.seconds is not None]
        return median(known) if known else None

    @property
    def helps(self) -> bool:
        return (self.measured or 0.0) >= HELPS and min(self.gains) > 1 and not self.error


class Tuning:
    """The trials of one run.

    Attributes:
        base: the run as it is; its first trial tells which changes are tried.
        tried: in their order; `together`, if several helped, is the last one.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.base = Tried(Candidate(BASE))
        self.tried: list[Tried] = []
        self._trials = 0

    def run(self) -> None:
        """All trials.

        Raises:
            SettingError: the run as it is cannot be tried, or a change made another run of it.
        """
        shutil.rmtree(self.plan.folder / "trials", ignore_errors=True)
        first = self._trial(self.base.candidate)
        if first.seconds is None or first.profile is None:
            raise SettingError(f"the run cannot be tried: {first.error}")
        self.base.outcomes.append(first)
        given = yaml.safe_load((self.plan.folder / "trials" / "1" / "config.yaml").read_text())
        found = candidates(first.profile, first.findings, given)
        for candidate in [each for kind in self.plan.kinds for each in found[kind]]:
            self._try(candidate, first)
        for _ in range(self.plan.turns - 1):
            base = self._trial_of_base()
            for tried in self.tried:
                if not tried.error:
                    self._add(tried, self._trial(tried.candidate), base)
        self._try_together()

    @property
    def best(self) -> Tried | None:
        """The change to recommend; None where the run is best as it is."""
        helping = [tried for tried in self.tried if tried.helps]
        return max(helping, key=lambda tried: tried.measured or 0.0, default=None)

    def _try(self, candidate: Candidate, base: Outcome) -> None:
        """A change, and those that follow from what it has measured."""
        tried = Tried(candidate)
        self.tried.append(tried)
        self._add(tried, self._trial(candidate), base)
        if candidate.then is not None and tried.seconds is not None and base.seconds is not None:
            following = candidate.then(base.seconds, tried.seconds)
            if following is not None:
                self._try(following, base)

    def _try_together(self) -> None:
        """The changes that helped, the best first; of two for the same setting the better one."""
        change: dict[str, Any] = {}
        helping = sorted((each for each in self.tried if each.helps), key=lambda each: -(each.measured or 0.0))
        taken, predicted = 0, 1.0
        for tried in helping:
            if not change.keys() & tried.candidate.change.keys():
                change |= tried.candidate.change
                taken, predicted = taken + 1, predicted * (tried.measured or 1.0)
        if taken < 2:
            return
        candidate = Candidate(TOGETHER, change, predicted, "the product of what each of them gains")
        together = Tried(candidate)
        self.tried.append(together)
        for _ in range(self.plan.turns):
            self._add(together, self._trial(candidate), self._trial_of_base())

    def _trial_of_base(self) -> Outcome:
        outcome = self._trial(self.base.candidate)
        if outcome.seconds is None:
            raise SettingError(f"the run as it is failed in a later turn: {outcome.error}")
        self.base.outcomes.append(outcome)
        return outcome

    def _add(self, tried: Tried, outcome: Outcome, base: Outcome) -> None:
        tried.outcomes.append(outcome)
        if outcome.seconds is None or base.seconds is None:
            return
        if outcome.identity != base.identity:
            raise SettingError(
                f"{' '.join(tried.candidate.overrides)} would train another student: it is nothing to tune"
            )
        tried.gains.append(base.seconds / outcome.seconds)
        shared = base.losses.keys() & outcome.losses.keys()
        differences = [abs(outcome.losses[step] / base.losses[step] - 1) for step in shared]
        tried.loss_difference = max([tried.loss_difference, *differences])

    def _trial(self, candidate: Candidate) -> Outcome:
        self._trials += 1
        plan = self.plan
        outcome = run_trial(plan.arguments, candidate.overrides, plan.steps, plan.folder / "trials" / str(self._trials))
        what = f"{1000 * outcome.seconds:,.1f} ms a step" if outcome.seconds is not None else outcome.error
        logger.info(f"trial {self._trials}, {' '.join([candidate.name, *candidate.overrides])}: {what}")
        return outcome
