"""Follows a training: metrics to file and tracker, a progress line, and the student's scores along the way."""

import logging
import time
from typing import Any

from distill.config.settings import Config, TrackerConfig
from distill.distributed import Backend
from distill.evaluation.evaluator import Evaluator, Scores
from distill.evaluation.measures import Measure
from distill.evaluation.sets import EvaluationSet
from distill.evaluation.significance import ModelLosses
from distill.optim.schedule import ENDLESS
from distill.report.live_run import RunPage
from distill.runs import trackers
from distill.runs.checkpoint import State
from distill.runs.curve import Curve
from distill.runs.points import Points
from distill.runs.run_folder import RunFolder
from distill.runtime.progress import Progress, duration

FIRST_MINUTE = 60.0  # seconds of typical steps, after which the time to the end is said once
UNTYPICAL_STEPS = 2  # at the start: they compile, or touch their memory for the first time

logger = logging.getLogger(__name__)


class Monitor:
    """What `train` calls after its steps and at the points of its history. Rank 0 writes; all ranks score."""

    def __init__(
        self,
        config: Config,
        folder: RunFolder,
        recipe: str,
        backend: Backend,
        student: Any,
        evaluator: Evaluator,
        sets: list[EvaluationSet],
        steps: int,
        state: State,
        page: RunPage,
        curve: Curve,
    ) -> None:
        """`steps`: after which the run ends; `state`: where it starts; `page`: gets every line of metrics."""
        self.config, self.folder, self.backend, self.student, self.page = config, folder, backend, student, page
        self.evaluator, self.sets, self.steps = evaluator, sets, steps
        self.points, self.curve = Points.of(config.evaluate), curve
        # Of the student at the last point, where anybody asks for them; None: an earlier process scored it.
        self.row_losses: ModelLosses | None = None
        tracker = config.tracker if backend.rank == 0 else TrackerConfig()
        self.tracker = trackers.build(tracker, folder.path, config.given, recipe)
        self.foretold, self.typical_since = False, 0.0
        self.first_step, self.typical = state.step, False  # whether the last steps were as fast as those to come
        self.progress = Progress("training", 0 if steps == ENDLESS else steps, "steps", start=state.step)

    def log_metrics(self, metrics: dict[str, float]) -> None:
        if self.backend.rank > 0:
            return
        self.folder.metrics.append(metrics)
        self.page.add(metrics)
        self.tracker.log_metrics(metrics, int(metrics["step"]))
        note = f"loss {metrics['loss/total']:.4f}, {metrics['tokens_per_second']:,.0f} tokens/s"
        self.progress.update(metrics["step"], note)
        if not self.typical:
            self.progress.begin_rate()
            self.typical = metrics["step"] - self.first_step > UNTYPICAL_STEPS
            self.typical_since = metrics["seconds"]
        elif not self.foretold and metrics["seconds"] - self.typical_since >= FIRST_MINUTE:
            self._foretell(metrics)

    def _foretell(self, metrics: dict[str, float]) -> None:
        """Say how long the training will take, by the rate of its first minute; compilation is none of it."""
        self.foretold = True
        left = self.progress.seconds_left
        if left:
            rate, end = metrics["tokens_per_second"], time.strftime("%H:%M", time.localtime(time.time() + left))
            logger.info(f"at {rate:,.0f} tokens a second the training ends in about {duration(left)}, at {end}")

    def at_point(self, state: State, epochs: float, losses: dict[str, float]) -> None:
        """Score the student, unless that was done before an interruption."""
        self.row_losses = None
        if self.backend.broadcast(any(line["step"] == state.step for line in self.history())):
            return
        scores: Scores = {}
        if self.points.scored or state.step >= self.steps:
            keep = "student" if state.step >= self.steps else None  # its agreement with the teacher comes next
            if self.config.evaluate.twin is None:
                scores = self.evaluator.score(self.student, "student", self.sets, keep)
            else:  # whose difference from the student is tested row by row
                scores, self.row_losses = self.evaluator.score_by_row(self.student, "student", self.sets, keep)
        if self.backend.rank > 0:
            return
        line = {"epoch": epochs, "step": state.step, "tokens": state.tokens, "seconds": state.seconds, "loss": losses}
        self.folder.history.append(line | scores)
        logger.info(history_line(line | scores, self.evaluator.measures))
        flat = {f"{measure}/{name}": value for measure, values in scores.items() for name, value in values.items()}
        self.tracker.log_metrics(flat, state.step)

    def history(self) -> list[dict[str, Any]]:
        return self.folder.history_lines()

    def last_scores(self) -> Scores | None:
        """The student's scores at the end of the run, when `at_point` has them."""
        last = self.backend.broadcast(self.history()[-1] if self.backend.rank == 0 else None)
        names = [measure.name for measure in self.evaluator.measures]
        return {name: last[name] for name in names} if all(name in last for name in names) else None

    def close(self) -> None:
        self.progress.close()
        self.tracker.close()


def history_line(line: dict[str, Any], measures: list[Measure]) -> str:
    """One line of history in words."""
    losses = ", ".join(f"{name} {value:.4f}" for name, value in line["loss"].items())
    scores = [
        f"{measure.title.lower()} {name} {value:.2f}"
        for measure in measures
        for name, value in line.get(measure.name, {}).items()
    ]
    return "; ".join([f"epoch {line['epoch']:g}, step {line['step']:,}: loss {losses}", *scores])
