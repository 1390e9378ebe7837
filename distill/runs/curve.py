"""Scores the student on a few sequences before it trains and at some points on the way: how long for how good."""

import logging
from dataclasses import replace
from typing import Any

from distill.config.evaluation import CurveConfig
from distill.evaluation.evaluator import Evaluator
from distill.evaluation.sets import EvaluationSet
from distill.optim.schedule import ENDLESS
from distill.runs.checkpoint import State
from distill.runs.facts import CurvePoint, LearningCurve
from distill.runs.profile.phases import EVALUATION, phase
from distill.runs.run_folder import RunFolder
from distill.runs.step import Follower, StepResult
from distill.runs.trackers import Tracker
from distill.runtime.jsonl import read_lines
from distill.runtime.progress import counted, duration, in_a_sentence

logger = logging.getLogger(__name__)


class Curve(Follower):
    """Perplexity on the first sequences of the first evaluation set, by step. All ranks score."""

    def __init__(
        self,
        settings: CurveConfig,
        folder: RunFolder,
        evaluator: Evaluator,
        models: tuple[Any, Any | None],
        sets: list[EvaluationSet],
        steps: int,
        tracker: Tracker,
    ) -> None:
        """
        Args:
            models: the student, and the teacher where it has a score on the same sequences.
            steps: after which the run ends; a run of so many minutes has no points on the way.
        """
        self.folder, self.evaluator, self.tracker = folder, evaluator, tracker
        self.measure = next(iter(evaluator.measures), None)  # labelled examples have none without a set
        self.student, self.teacher = models
        self.data = _first_sequences(sets[0], settings.sequences) if sets else None
        # Only perplexity is known to be one of any sequences of a set; a run that the clock ends has no known steps.
        is_perplexity = self.measure is not None and self.measure.name == "perplexity"
        usable = self.data is not None and is_perplexity and steps != ENDLESS
        count = settings.points if usable else 0
        self.steps = frozenset(round(number * steps / count) for number in range(count + 1)) if count else frozenset()
        self.teacher_score: float | None = None

    def begin(self, state: State) -> None:
        """Score the teacher, and a student that has not learned yet."""
        if self.steps and self.teacher is not None:
            self.teacher_score = self._scored(self.teacher)
        self._score_student(state)

    def after_step(self, state: State, result: StepResult) -> None:
        """Score the student where this step is one of the points."""
        if state.step in self.steps and not result.diverged:
            with phase(EVALUATION):
                self._score_student(state)

    def _score_student(self, state: State) -> None:
        """Score it at one of the points, unless it was scored there before an interruption."""
        if state.step not in self.steps:
            return
        ranks = self.folder.ranks
        if ranks.broadcast(any(line["step"] == state.step for line in self.lines())):
            return
        score = self._scored(self.student)
        if ranks.rank == 0 and score is not None and self.measure is not None:
            self.folder.curve.append(
                {"step": state.step, "tokens": state.tokens, "seconds": state.seconds, "score": score}
            )
            self.tracker.log_metrics({f"curve/{self.measure.name}": score}, state.step)
            logger.info(self._said(state, score))

    def lines(self) -> list[dict[str, float]]:
        """The points so far, on rank 0; on others nothing."""
        return read_lines(self.folder.curve_path) if self.folder.writes else []

    def recorded(self) -> LearningCurve | None:
        """What the record keeps of it; None where nothing was scored."""
        lines = self.lines()
        if not lines or self.data is None or self.measure is None:
            return None
        points = [CurvePoint.model_validate(line) for line in lines]
        return LearningCurve(
            measure=self.measure.name,
            data=self.data.name,
            sequences=self.data.num_sequences,
            teacher=self.teacher_score,
            student=points,
        )

    def _scored(self, model: Any) -> float | None:
        assert self.data is not None and self.measure is not None
        return self.evaluator.score_one(model, self.measure, self.data)

    def _said(self, state: State, score: float) -> str:
        assert self.data is not None and self.measure is not None
        when = f"after {duration(state.seconds)} of training" if state.step else "before training"
        teacher = "" if self.teacher_score is None else f" (teacher {self.teacher_score:,.4g})"
        scored = f"{counted(self.data.num_sequences, 'sequence')} of {self.data.name}"
        return f"{when}: {in_a_sentence(self.measure.title)} {score:,.4g}{teacher}, on {scored}"


def _first_sequences(data: EvaluationSet, count: int) -> EvaluationSet:
    numbers = None if data.numbers is None else data.numbers[:count]
    text = data.sequences if data.text is None else data.text
    return replace(data, sequences=data.sequences[:count], numbers=numbers, text=text)
