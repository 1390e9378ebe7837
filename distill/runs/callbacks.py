"""The log of a run with its progress line, observers of the user's own, and which snapshots there are and can be."""

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Self

from distill.config.component import Component
from distill.config.settings import TrainConfig
from distill.distributed import Ranks
from distill.objective.running_mean import TOKENS, RunningMean
from distill.optim.schedule import ENDLESS
from distill.runs.checkpoint import step_of
from distill.runs.facts import HistoryPoint
from distill.runs.on_policy import Samples
from distill.runs.run import Run
from distill.runs.state import State
from distill.runs.step import Callback, StepResult
from distill.runs.trackers import Tracker
from distill.runtime.errors import Interrupted, SettingError
from distill.runtime.jsonl import LogLine
from distill.runtime.progress import Progress
from distill.runtime.users_code import mistake

UNTYPICAL_STEPS = 2  # at the start: they compile, or touch their memory for the first time
METHODS = ("after_step", "at_evaluation", "at_checkpoint")

logger = logging.getLogger(__name__)


class RunLog(Callback):
    """Writes the mean of every so many steps to metrics.jsonl and the tracker, and the progress line; rank 0 does.

    The last step of a start of the run has a line, too, and one that is skipped.
    """

    def __init__(self, run: Run, state: State, tracker: Tracker) -> None:
        """`state`: of the training, from where it begins on."""
        self.objective, self.batches, self.every = run.objective, run.data.batches, run.config.train.log_every
        self.folder, self.tracker, self.state, self.first_step = run.folder, tracker, state, state.step
        self._samples: Samples | None = None  # the newest of the line
        self._collapsed = False  # whether the newest of all are
        self._begin_line()
        total, self._seconds = 0 if run.limits.steps == ENDLESS else run.limits.steps, 60 * run.limits.minutes
        self.progress = Progress("training", total, "steps", start=state.step, limit=self._seconds - state.seconds)

    def after_step(self, step: StepResult) -> None:
        self._losses.tokens += int(step.counts[TOKENS])  # also of a step that is skipped
        self._waited += step.data_wait
        if step.samples is not None:
            self._follow(step.samples)
        if not step.skipped:
            self._losses.add(step.sums, step.counts, step.weights)
        if step.step % self.every == 0 or step.over or step.stop is not None or step.skipped:
            self.write(self._line(step))
            self._begin_line()

    def _follow(self, samples: Samples) -> None:
        """Keep what the student has written for the line of the log; warn where it begins to write next to nothing."""
        if samples.collapsed and not self._collapsed:
            logger.warning(
                f"step {self.state.step}: the student's completions collapse to {samples.mean_length:.1f} tokens, "
                f"where the text has {samples.text_length:.1f}: lower optimizer.lr or objective.on_policy.fraction, or "
                "set objective.on_policy.seeded_tokens"
            )
        self._collapsed, self._samples = samples.collapsed, samples

    def _begin_line(self) -> None:
        self._losses, self._waited, self._began = RunningMean(), 0.0, self.state.seconds
        self._samples = None

    def _line(self, step: StepResult) -> LogLine:
        span = max(self.state.seconds - self._began, 1e-9)
        line: LogLine = {
            "step": step.step,
            "epoch": step.epoch,
            "tokens": step.tokens,
            "seconds": self.state.seconds,
            **{f"loss/{name}": mean for name, mean in self._losses.means(self.objective.names).items()},
            **self.objective.scheduled(),
            "lr": step.lr,
            "grad_norm": step.grad_norm,
            "tokens_per_second": self._losses.tokens / span,
            "data_wait": self._waited / span,
            "skipped": self.state.skipped,
            **{f"sequences/{name}": fed.sequences for name, fed in self.batches.sources_fed(step.step).items()},
        }
        if step.loss_scale is not None:
            line |= {"loss_scale": step.loss_scale, "overflows": self.state.overflows}
        return line if self._samples is None else line | self._samples.metrics()

    def write(self, metrics: LogLine) -> None:
        if not self.folder.writes:
            return
        self.folder.metrics.append(metrics)
        self.tracker.log_metrics(metrics, int(metrics["step"]))
        self.progress.end_in(self._seconds - metrics["seconds"])  # train.minutes leaves out evaluations
        note = f"loss {metrics['loss/total']:.4f}, {metrics['tokens_per_second']:,.0f} tokens/s"
        self.progress.update(metrics["step"], note)
        if metrics["step"] - self.first_step <= max(UNTYPICAL_STEPS, self.every):
            self.progress.begin_rate()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self.progress.close()
        # One that a signal ends has not failed: its command continues it.
        self.tracker.close(failed=error is not None and not isinstance(error, Interrupted))


def kept_snapshots(folder: Path) -> list[int]:
    """The steps of all snapshots that are there, in their order."""
    return sorted(step for path in folder.glob("step-*") if path.is_dir() and (step := step_of(path)) is not None)


def check_snapshots(settings: TrainConfig, steps: int) -> None:
    """Raises SettingError for snapshots that a run of so many steps never reaches."""
    due = [*(settings.snapshots or []), *([] if settings.snapshot_every is None else [settings.snapshot_every])]
    if late := [step for step in due if step > steps]:
        name = "snapshots" if late[0] in (settings.snapshots or []) else "snapshot_every"
        raise SettingError(
            f"comes to step {late[0]}, but the run ends after step {steps}",
            setting=f"train.{name}",
            value=getattr(settings, name),
            cure="leave it out, or make the run longer (train.epochs, train.steps)",
        )


class Observer(Callback):
    """Looks on while a run trains: a subclass overrides what it wants to see, and `observers.NAME._target_` names it.

    Rank 0 alone makes it and calls it, behind everything else that follows a step, and the other ranks wait for it;
    what it reads is the same on all ranks. Its constructor gets `folder`, the folder of the run, where it takes it;
    what a killed start left there after its last checkpoint is dropped later. It is to change nothing. What it
    raises ends the run in one line with status 2, on all ranks; the checkpoints so far are kept. A run that resumes
    makes a new one, and calls it again for the steps after the checkpoint, and for the evaluation at it.
    """


class UserObservers(Callback):
    """Calls the user's observers, which rank 0 alone has; what they raise ends all ranks alike."""

    def __init__(self, components: dict[str, Component], folder: Path, ranks: Ranks) -> None:
        """Make the observers; all ranks call it.

        Args:
            folder: of the run, which exists.

        Raises:
            SettingError: on all ranks, where one cannot be made.
        """
        self.components, self.ranks = components, ranks
        self.observers = dict[str, object]()  # by name, on rank 0: objects with some of `METHODS`
        if components:
            ranks.decide(lambda: self._make(folder))

    def _make(self, folder: Path) -> None:
        for name, component in self.components.items():
            made = component(folder=folder)
            if not _observes(made) and not callable(made):
                raise _no_observer(component)
            self.observers[name] = made if _observes(made) else SimpleNamespace(after_step=made)  # a plain function

    def after_step(self, step: StepResult) -> None:
        self._call("after_step", step, short=True)

    def at_evaluation(self, evaluation: HistoryPoint) -> None:
        if any(evaluation.scores.values()):
            self._call("at_evaluation", evaluation)

    def at_checkpoint(self, folder: Path) -> None:
        self._call("at_checkpoint", folder)

    def _call(self, method: str, observed: StepResult | HistoryPoint | Path, short: bool = False) -> None:
        """Raises SettingError, naming the observer, for whatever it raises."""

        def call() -> None:
            for name, observer in self.observers.items():
                try:
                    getattr(observer, method, lambda _: None)(observed)
                except Exception as error:
                    raise SettingError(f"observers.{name}: {mistake(error)}") from error

        if self.components:
            self.ranks.decide(call, short)


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
            raise _no_observer(component)


def _observes(observer: object) -> bool:
    """Whether it has one of the methods, other than those of the base class, which do nothing."""
    for name in METHODS:
        method = getattr(observer, name, None)
        if callable(method) and getattr(method, "__func__", method) is not getattr(Callback, name):
            return True
    return False


def _no_observer(component: Component) -> SettingError:
    return SettingError(
        f"{component.setting}._target_={component.path} is no observer: name a class with one of the methods "
        f"{', '.join(METHODS)}, such as a subclass of distill.Observer"
    )
