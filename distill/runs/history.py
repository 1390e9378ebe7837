"""The history of a run: the points at which its losses are summed up and its student is scored."""

import logging
from dataclasses import dataclass
from typing import Any

from distill.config.settings import Config, EvaluateConfig
from distill.evaluation.evaluator import Evaluator, Scores
from distill.evaluation.measures import Measure
from distill.evaluation.sets import EvaluationSet
from distill.evaluation.significance import ModelLosses
from distill.optim.schedule import ENDLESS
from distill.runs.checkpoint import State
from distill.runs.facts import HistoryPoint
from distill.runs.run_folder import RunFolder
from distill.runs.trackers import Tracker
from distill.runtime.errors import SettingError
from distill.runtime.jsonl import LogLine, read_lines, without_nan
from distill.runtime.progress import in_a_sentence

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Points:
    """Where the lines of history.jsonl stand; the end of a run is always one, whatever ends it.

    Attributes:
        every_steps: a point after every so many steps; None: none of these.
        epochs: a point after every epoch.
        scored: whether the student is scored at them, or at the end of the run alone.
    """

    every_steps: int | None = None
    epochs: bool = True
    scored: bool = True

    @classmethod
    def of(cls, settings: EvaluateConfig) -> "Points":
        """With `every_steps` the epochs count only with `every_epoch`."""
        if settings.every_steps is None:
            return cls(None, True, settings.every_epoch is not False)
        return cls(settings.every_steps, settings.every_epoch is True)

    def first(self, steps_per_epoch: int) -> int:
        """The steps before the first one."""
        return min(self.every_steps or steps_per_epoch, steps_per_epoch if self.epochs else ENDLESS)

    def after(self, step: int, steps_per_epoch: int) -> bool:
        """Whether there is a point when this many steps are done."""
        by_steps = self.every_steps is not None and step % self.every_steps == 0
        return by_steps or (self.epochs and step % steps_per_epoch == 0)


def check_best(config: Config, steps: int, steps_per_epoch: int) -> None:
    """Raises SettingError for `train.keep_best` in a run of so many steps that is scored at its end alone."""
    points = Points.of(config.evaluate)
    if config.train.keep_best is not None and (not points.scored or points.first(steps_per_epoch) >= steps):
        every = (
            f"set evaluate.every_steps=N below the {steps:,} steps of the run"
            if steps != ENDLESS
            else ("set evaluate.every_steps=N")
        )
        raise SettingError(
            f"train.keep_best={config.train.keep_best} chooses among evaluations during training, but this run is "
            f"scored only at its end: {every}, or leave train.keep_best out"
        )


@dataclass(frozen=True)
class Examination:
    """What the student is scored on, and by what."""

    evaluator: Evaluator
    sets: list[EvaluationSet]
    by_sequence: bool  # whether its losses are kept by sequence, as its difference from a baseline is tested by them

    def score(self, model: Any, label: str, keep: str | None) -> tuple[Scores, ModelLosses | None]:
        """The scores of a model, and its losses by sequence where they are kept; all ranks call it."""
        if self.by_sequence:
            return self.evaluator.score_by_sequence(model, label, self.sets, keep)
        return self.evaluator.score(model, label, self.sets, keep), None


class StudentHistory:
    """Scores the student at the points of a run, and writes a line for each. Rank 0 writes; all ranks score."""

    def __init__(
        self,
        points: Points,
        examination: Examination,
        student: Any,
        steps: int,
        steps_per_epoch: int,
        folder: RunFolder,
        tracker: Tracker,
    ) -> None:
        """`steps`: after which the run ends."""
        self.points, self.examination, self.student, self.steps = points, examination, student, steps
        self.steps_per_epoch, self.folder, self.tracker = steps_per_epoch, folder, tracker
        # Of the student by the step of the last point, where they are kept, unless an earlier process scored it.
        self._sequence_losses: dict[int, ModelLosses | None] = {}
        self._scored_steps: set[int] = set()  # by this process, with the sets and settings of now

    def due(self, step: int) -> bool:
        return self.points.after(step, self.steps_per_epoch)

    def at_point(self, state: State, epochs: float, losses: dict[str, float]) -> HistoryPoint:
        """Score the student, unless that was done before an interruption."""
        self._sequence_losses = {}
        earlier = self.folder.ranks.broadcast([line for line in self.lines() if line["step"] == state.step])
        return HistoryPoint.of(earlier[0] if earlier else self._line(state, epochs, losses))

    def _line(self, state: State, epochs: float, losses: dict[str, float]) -> LogLine:
        """The line of a point, with the scores of the student where it has some; rank 0 writes it."""
        scores, ends = Scores(), state.step >= self.steps
        if self.points.scored or ends:
            keep = "student" if ends else None  # its agreement with the teacher comes next
            scores, losses_by_sequence = self.examination.score(self.student, "student", keep)
            self._sequence_losses = {state.step: losses_by_sequence}
            self._scored_steps.add(state.step)
        place = {"epoch": epochs, "step": state.step, "tokens": state.tokens, "seconds": state.seconds}
        line: LogLine = without_nan({**place, "loss": losses, **scores})
        if not self.folder.writes:
            return line
        self.folder.history.append(line)
        logger.info(history_line({**place, "loss": losses, **scores}, self.examination.evaluator.measures))
        flat = {f"{measure}/{name}": value for measure, values in scores.items() for name, value in values.items()}
        self.tracker.log_metrics(flat, state.step)
        return line

    def lines(self) -> list[LogLine]:
        return read_lines(self.folder.history_path)

    def scores_at(self, step: int) -> tuple[Scores | None, ModelLosses | None]:
        """The student's scores at a point, and its losses by sequence; all ranks call it.

        Both are None where the point has no scores, where an earlier process scored it, perhaps on other sets, or where
        the losses are of use and are not known any more.
        """
        lines = [line for line in self.lines() if line["step"] == step]
        line = self.folder.ranks.broadcast(lines[-1] if lines else {})
        losses = self._sequence_losses.get(step)
        names = [measure.name for measure in self.examination.evaluator.measures]
        if step not in self._scored_steps or not all(name in line for name in names):
            return None, None
        if self.examination.by_sequence and losses is None:
            return None, None
        return {name: line[name] for name in names}, losses


def history_line(line: LogLine, measures: list[Measure]) -> str:
    """One line of history in words."""
    losses = ", ".join(f"{name} {value:.4f}" for name, value in line["loss"].items())
    scores = [
        f"{in_a_sentence(measure.title)} {name} {value:.2f}"
        for measure in measures
        for name, value in line.get(measure.name, {}).items()
    ]
    return "; ".join([f"epoch {line['epoch']:g}, step {line['step']:,}: loss {losses}", *scores])
