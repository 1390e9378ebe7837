"""Observers of the user's own: what they may read of a training, and how a run calls them. Rank 0 alone has them."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, SimpleNamespace

from distill.config.component import Component
from distill.data.batches import Batches
from distill.distributed import Ranks
from distill.objective.objective import Objective
from distill.objective.running_mean import RunningMean
from distill.runs.checkpoint import State
from distill.runs.facts import HistoryPoint
from distill.runs.step import Follower, StepResult
from distill.runtime.errors import SettingError
from distill.runtime.users_code import mistake

METHODS = ("after_step", "at_evaluation", "at_checkpoint")
CURE = f"name a class with one of the methods {', '.join(METHODS)}, such as a subclass of distill.Observer"


@dataclass(frozen=True)
class Observed:
    """How far a training is, the same on all ranks.

    Attributes:
        step: how many are done, also in earlier starts of the run.
        epoch: passes over the corpus by then.
        tokens: seen by then, of all ranks, without padding.
    """

    step: int
    epoch: float
    tokens: int


@dataclass(frozen=True)
class ObservedStep(Observed):
    """One step of a training, the same on all ranks.

    Attributes:
        losses: `total`, the weighted sum, and the mean of each term, without its weight, over the positions of the
            step; nan where the step had none for a term.
        lr: the learning rate of the step.
        grad_norm: of the whole gradient, before it was clipped.
        skipped: whether loss or gradient was not finite, so that no weight was changed.
    """

    losses: Mapping[str, float]
    lr: float
    grad_norm: float
    skipped: bool


@dataclass(frozen=True)
class ObservedEvaluation(Observed):
    """One evaluation in the course of a training, the same on all ranks.

    Attributes:
        losses: `total` and the mean of each term since the evaluation before.
        scores: of the student, by measure and set: `scores["perplexity"]["heldout"]`; what is not finite is None.
    """

    losses: Mapping[str, float | None]
    scores: Mapping[str, Mapping[str, float | None]]


@dataclass(frozen=True)
class ObservedCheckpoint(Observed):
    """One checkpoint of a training.

    Attributes:
        folder: where it is, whole; `train.keep` says how long.
    """

    folder: Path


class Observer:
    """Looks on while a run trains: a subclass overrides what it wants to see, and `observers.NAME._target_` names it.

    Rank 0 alone makes it and calls it, behind everything else that follows a step, and the other ranks wait for it;
    what it reads is the same on all ranks. Its constructor gets `folder`, the folder of the run, where it takes it;
    what a killed start left there after its last checkpoint is dropped later. It cannot change the training. What it
    raises ends the run in one line with status 2, on all ranks; the checkpoints so far are kept. A run that resumes
    makes a new one, and calls it again for the steps after the checkpoint, and for the evaluation at it.
    """

    def after_step(self, step: ObservedStep) -> None:
        """Called after each step, before its checkpoint."""

    def at_evaluation(self, evaluation: ObservedEvaluation) -> None:
        """Called after the student was scored."""

    def at_checkpoint(self, checkpoint: ObservedCheckpoint) -> None:
        """Called after a checkpoint was written."""


@dataclass(frozen=True)
class UserObservers(Follower):
    """Calls the user's observers, which rank 0 alone has; what they raise ends all ranks alike."""

    names: Collection[str]  # of the observers, the same on all ranks
    observers: Mapping[str, object]  # by name, on rank 0: objects with some of `METHODS`
    objective: Objective
    batches: Batches
    ranks: Ranks

    def after_step(self, state: State, result: StepResult) -> None:
        if not self.names:
            return
        losses = RunningMean()
        losses.add(result.sums, result.counts, result.weights)
        means = MappingProxyType(losses.means(self.objective.names))
        step = ObservedStep(*self._place(state), means, result.lr, result.norm, not result.finite)
        self.ranks.decide(lambda: self._call(METHODS[0], step), short=True)

    def at_evaluation(self, state: State, point: HistoryPoint) -> None:
        scores = {name: MappingProxyType(by_set) for name, by_set in point.scores.items() if by_set}
        if scores and self.names:
            losses = MappingProxyType(point.loss)
            evaluation = ObservedEvaluation(*self._place(state), losses, MappingProxyType(scores))
            self.ranks.decide(lambda: self._call(METHODS[1], evaluation))

    def at_checkpoint(self, state: State, folder: Path) -> None:
        if self.names:
            checkpoint = ObservedCheckpoint(*self._place(state), folder)
            self.ranks.decide(lambda: self._call(METHODS[2], checkpoint))

    def _place(self, state: State) -> tuple[int, float, int]:
        return state.step, state.step / self.batches.steps_per_epoch, state.tokens

    def _call(self, method: str, observed: Observed) -> None:
        """Raises SettingError, naming the observer, for whatever it raises."""
        for name, observer in self.observers.items():
            try:
                if (call := getattr(observer, method, None)) is not None:
                    call(observed)
            except Exception as error:
                raise SettingError(f"observers.{name}: {mistake(error)}") from error


def check_observers(components: dict[str, Component]) -> None:
    """Refuse a component that cannot be an observer, before there is a run to look at.

    Raises:
        SettingError: a name that is no identifier, a target that cannot be imported, or arguments that it does not
            take.
    """
    for name, component in components.items():
        if not name.isidentifier():
            raise SettingError(
                f"{component.setting}: the name of an observer has to be letters, digits and underscores"
            )
        target, _ = component.bind(folder=Path())
        if isinstance(target, type) and not _observes(target):
            raise SettingError(f"{component.setting}._target_={component.path} is no observer: {CURE}")


def make_observers(components: dict[str, Component], folder: Path, ranks: Ranks) -> dict[str, object]:
    """The observers by name, on rank 0; all ranks call it.

    Args:
        folder: of the run, which exists.

    Raises:
        SettingError: on all ranks, where one cannot be made.
    """
    made = dict[str, object]()
    if components:
        ranks.decide(lambda: made.update({name: _make(part, folder) for name, part in components.items()}))
    return made


def _make(component: Component, folder: Path) -> object:
    made = component(folder=folder)
    if _observes(made):
        return made
    if callable(made):
        return SimpleNamespace(after_step=made)  # a plain function of a step
    raise SettingError(f"{component.setting}._target_={component.path} gives no observer: {CURE}")


def _observes(observer: object) -> bool:
    """Whether it has one of the methods, other than those of the base class, which do nothing."""
    methods = ((name, getattr(observer, name, None)) for name in METHODS)
    return any(
        callable(method) and getattr(method, "__func__", method) is not getattr(Observer, name)
        for name, method in methods
    )
