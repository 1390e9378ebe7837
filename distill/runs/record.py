"""The record of a run: what it was, what it did and what came of it, which grows until it is results.json.

Everything that shows a run reads this and nothing else. A value that is not known, or not yet, is None, and a part
without any is an empty one; only a model that a run does not have, and what hangs on it, is None as a whole.
"""

import shlex
from dataclasses import dataclass, field, replace
from typing import Any

from distill.runs.facts import (
    Agreement,
    Backend,
    Baseline,
    Best,
    Corpus,
    Environment,
    EvaluationSet,
    HistoryPoint,
    LearningCurve,
    Measure,
    Model,
    Objective,
    Optimizer,
    Profile,
    Student,
    Teacher,
    Training,
)
from distill.runs.parts import from_json, stored, to_json
from distill.runtime.errors import SettingError
from distill.runtime.jsonl import LogLine
from distill.runtime.redaction import redacted

VERSION = 1


@dataclass(frozen=True)
class Sample:
    """The beginning of a text, and what each model writes behind it."""

    prompt: str = ""  # as text, without special tokens
    continuations: dict[str, str] = field(default_factory=dict)  # by model: `teacher`, `student`, `baseline`


@dataclass(frozen=True)
class Samples:
    """How the models of a run continue the same beginnings, which shows how they write and measures nothing."""

    data: str = field(default="", metadata=stored("set"))  # the evaluation set that the beginnings are from
    temperature: float | None = None  # at which each token is drawn
    max_tokens: int | None = None  # of a continuation
    texts: list[Sample] = field(default_factory=list)  # in the order of the report


@dataclass(frozen=True)
class Record:
    """A run.

    Attributes:
        started_in: the working folder of the command, in which its relative paths mean what they do.
        identity, precision: settings by their names.
        finished: whether the student is published.
        history_by: what the history is shown by, `epoch` or `step`.
        student_files: SHA-256 of the files in student/, by name.
        snapshot: the step after which a student was kept that this describes; None of a whole run.
    """

    version: int = VERSION
    recipe: str | None = None
    command: str | None = None
    started_in: str | None = field(default=None, metadata=stored(sparse=True))
    notes: list[str] = field(default_factory=list)
    identity: dict[str, Any] = field(default_factory=dict)
    finished: bool = False
    corpus: Corpus = field(default_factory=Corpus)
    teacher: Teacher | None = None
    student: Student | None = None
    baseline: Baseline | None = None
    agreement: dict[str, Agreement] | None = None
    samples: Samples | None = field(default=None, metadata=stored(sparse=True))
    evaluation: dict[str, EvaluationSet] = field(default_factory=dict)
    objective: Objective = field(default_factory=Objective)
    optimizer: Optimizer = field(default_factory=Optimizer)
    measures: dict[str, Measure] = field(default_factory=dict)
    training: Training = field(default_factory=Training)
    precision: dict[str, Any] = field(default_factory=dict)
    backend: Backend = field(default_factory=Backend)
    environment: Environment = field(default_factory=Environment)
    history_by: str = "epoch"
    history: list[HistoryPoint] = field(default_factory=list)
    best: Best | None = field(default=None, metadata=stored(sparse=True))
    curve: LearningCurve | None = None
    snapshots: list[int] = field(default_factory=list)
    snapshot: int | None = field(default=None, metadata=stored(sparse=True))
    profile: Profile | None = None
    student_files: dict[str, str] = field(default_factory=dict, metadata=stored(sparse=True))

    def to_json(self) -> dict[str, Any]:
        """What results.json holds."""
        content: dict[str, Any] = to_json(self)
        return content

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> "Record":
        """The record that `to_json` has written.

        Raises:
            SettingError: a value is of another kind than there belongs, or a later release wrote it.
        """
        version = content.get("version")
        if isinstance(version, int) and version > VERSION:
            raise SettingError(f"version={version} is of a later release: update Distill to read it")
        try:
            record = from_json(cls, {**content, "version": VERSION})
        except ValueError as error:
            raise SettingError(str(error)) from None
        titled = {name: replace(measure, title=measure.title or name) for name, measure in record.measures.items()}
        return replace(record, measures=titled)

    @property
    def command_from_anywhere(self) -> str:
        """The command with the folder to give it in; empty where there is none."""
        if not self.command or not self.started_in:
            return self.command or ""
        return f"cd {shlex.quote(self.started_in)} && {self.command}"

    @property
    def changed_groups(self) -> list[str]:
        """The groups of settings of text, models and loss that the command changes of its recipe."""
        try:
            names = [word.partition("=")[0].lstrip("+~") for word in shlex.split(self.command or "")]
        except ValueError:  # a quotation mark that is never closed
            return []
        changed = {name.partition(".")[0] for name in names}
        return [group for group in ("corpus", "teacher", "student", "objective") if group in changed]

    def redacted(self) -> "Record":
        """This record without secrets in its texts."""
        return Record.from_json(redacted(self.to_json()))

    def with_history(self, lines: list[LogLine]) -> "Record":
        """This record with these lines of history.jsonl, and the best of them."""
        points = [HistoryPoint.of(line) for line in lines]
        return replace(self, history=points, best=self.best and self.best.among(points))

    @property
    def first_measure(self) -> tuple[str, Measure]:
        """Name and description of the measure that decides which of two models is better; empty ones without any."""
        return next(iter(self.measures.items()), ("", Measure()))

    def models(self) -> dict[str, Model]:
        """The teacher, student and baseline that the run has, by their names in figures and tables."""
        models: dict[str, Model | None] = {"teacher": self.teacher, "student": self.student, "baseline": self.baseline}
        return {name: model for name, model in models.items() if model is not None}

    def label_of(self, data: str) -> str:
        """What an evaluation set is called in the report."""
        return (self.evaluation.get(data) or EvaluationSet()).name or data

    def is_scored(self, data: str) -> bool:
        """Whether an evaluation set has positions to score, as far as is known; without any its scores mean nothing."""
        return (self.evaluation.get(data) or EvaluationSet()).positions != 0

    def sets_of(self, measure: str) -> list[str]:
        """Evaluation sets for which any model or point of the history has a number, in the order of `evaluation`.

        One without a scored position has none, whatever is there.
        """
        scored = [*(model.scores for model in self.models().values()), *(point.scores for point in self.history)]
        values = [scores_by_set.get(measure) or {} for scores_by_set in scored]
        names = [name for by_set in values for name, value in by_set.items() if value is not None]
        order = list(self.evaluation)
        scored_names = [name for name in dict.fromkeys(names) if self.is_scored(name)]
        return sorted(scored_names, key=lambda name: order.index(name) if name in order else len(order))


def term_titles(*parts: Record | Baseline) -> dict[str, str]:
    """Title by name of every loss term of these, the weighted total first.

    Terms that an objective does not describe are those that its history has losses of.
    """
    titles = {"total": "Total"}
    for part in parts:
        for name, term in part.objective.terms.items():
            titles.setdefault(name, term.title or name)
        for point in part.history:
            for name in point.loss:
                titles.setdefault(name, name)
    return titles
