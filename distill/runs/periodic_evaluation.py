"""The evaluations in the course of a training: at which steps, on what, and what history.jsonl keeps of each."""

import logging

from distill.config.settings import Config, EvaluateConfig
from distill.evaluation.evaluator import Evaluator, Scores
from distill.evaluation.measures import Measure
from distill.evaluation.significance import ModelLosses
from distill.optim.schedule import ENDLESS
from distill.runs.facts import HistoryPoint
from distill.runs.run import Run, scores_on_the_way
from distill.runs.state import State
from distill.runs.trackers import Tracker
from distill.runtime.errors import SettingError
from distill.runtime.jsonl import LogLine, read_lines, without_nan
from distill.runtime.progress import in_a_sentence

logger = logging.getLogger(__name__)


def is_due(settings: EvaluateConfig, step: int, steps_per_epoch: int) -> bool:
    """Whether there is an evaluation after so many steps; with `every_steps` epochs count only with `every_epoch`."""
    every, by_epochs = settings.every_steps, settings.every_steps is None or settings.every_epoch is True
    return (every is not None and step % every == 0) or (by_epochs and step % steps_per_epoch == 0)


def check_best(config: Config, steps: int, steps_per_epoch: int) -> None:
    """Raises SettingError for `train.keep_best` in a run of so many steps that is scored at its end alone."""
    settings = config.evaluate
    every = [*([] if settings.every_steps is None else [settings.every_steps]), steps_per_epoch]
    first = min((each for each in every if is_due(settings, each, steps_per_epoch)), default=steps)
    if config.train.keep_best is not None and (not scores_on_the_way(settings) or first >= steps):
        below = "" if steps == ENDLESS else f" below the {steps:,} steps of the run"
        raise SettingError(
            f"train.keep_best={config.train.keep_best} chooses among evaluations during training, but this run is "
            f"scored only at its end: set evaluate.every_steps=N{below}, or leave train.keep_best out"
        )


class PeriodicEvaluation:
    """Scores the student in the course of a run, and writes a line for each time. Rank 0 writes; all ranks score.

    Attributes:
        sets: what is scored, the first `evaluate.on_the_way.sequences` of each set where that is given.
    """

    def __init__(self, run: Run, evaluator: Evaluator, tracker: Tracker) -> None:
        self.run, self.evaluator, self.tracker = run, evaluator, tracker
        self.settings, self.steps_per_epoch = run.config.evaluate, run.data.batches.steps_per_epoch
        few, whole = run.scored_on_the_way, run.data.sets
        self.sets, self._are_whole = whole if few is None else [data.first(few) for data in whole], few is None
        self._scores = dict[int, Scores]()  # of the student by step, as this process has scored it
        self._losses = dict[int, ModelLosses]()  # the same by sequence, of the last step alone

    def due(self, step: int) -> bool:
        """Whether there is an evaluation after so many steps; the end of a run is always one."""
        return is_due(self.settings, step, self.steps_per_epoch)

    def evaluate(self, state: State, losses: dict[str, float]) -> HistoryPoint:
        """Score the student, unless that was done before an interruption.

        It is called after the step's checkpoint, and once more for the same step after a resume from there.

        Args:
            losses: `total` and the mean of each term since the evaluation before.

        Returns:
            The evaluation, the same on all ranks but for its seconds.
        """
        self._losses = {}
        earlier = self.run.ranks.broadcast([line for line in self.lines() if line["step"] == state.step])
        return HistoryPoint.model_validate(earlier[0] if earlier else self._line(state, losses))

    def _line(self, state: State, losses: dict[str, float]) -> LogLine:
        """The line of an evaluation, with the scores of the student where it has some; rank 0 writes it."""
        scores, ends = Scores(), state.step >= self.run.steps
        if scores_on_the_way(self.settings) or ends:
            scores, by_sequence = self.evaluator.score_by_sequence(self.run.pair.student, "student", self.sets)
            self._losses = {state.step: by_sequence}
        place = {"epoch": state.step / self.steps_per_epoch, "step": state.step}
        exact = {**place, "tokens": state.tokens, "seconds": state.seconds, "loss": losses, **scores}
        line: LogLine = without_nan(exact)
        if scores and self._are_whole:
            self._scores[state.step] = {name: line[name] for name in scores}
        if self.run.folder.writes:
            self.run.folder.history.append(line)
            logger.info(history_line(exact, self.evaluator.measures))
            flat = {f"{measure}/{name}": value for measure, values in scores.items() for name, value in values.items()}
            self.tracker.log_metrics(flat, state.step)
        return line

    def scores_at(self, step: int) -> tuple[Scores, ModelLosses] | None:
        """The student's scores on the whole sets after a step, and its losses by sequence.

        None where this process has not scored it there, or does not know the losses any more: only a baseline needs
        them (`evaluate.baseline`).
        """
        if step not in self._scores or (self.settings.baseline is not None and step not in self._losses):
            return None
        return self._scores[step], self._losses.get(step, {})

    def lines(self) -> list[LogLine]:
        """Those of history.jsonl."""
        return read_lines(self.run.folder.history_path)


def history_line(line: LogLine, measures: list[Measure]) -> str:
    """One line of history in words."""
    losses = ", ".join(f"{name} {value:.4f}" for name, value in line["loss"].items())
    scores = [
        f"{in_a_sentence(measure.title)} {name} {value:.2f}"
        for measure in measures
        for name, value in line.get(measure.name, {}).items()
    ]
    return "; ".join([f"epoch {line['epoch']:g}, step {line['step']:,}: loss {losses}", *scores])
