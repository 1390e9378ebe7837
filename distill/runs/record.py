"""The record of a run: what it was, what it did and what came of it, which grows until it is results.json.

Everything that shows a run reads this and nothing else. A value that is not known, or not yet, is None, and a part
without any is an empty one; only a model that a run does not have, and what hangs on it, is None as a whole.
"""

import shlex
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import ValidationError

from distill.runs.facts import (
    Agreement,
    Backend,
    Baseline,
    Best,
    Corpus,
    Environment,
    EvaluationSet,
    HistoryPoint,
    Measure,
    Model,
    Objective,
    Optimizer,
    Part,
    Profile,
    Samples,
    Student,
    Teacher,
    Training,
    field,
    sparse,
)
from distill.runtime.errors import SettingError
from distill.runtime.jsonl import LogLine
from distill.runtime.redaction import redacted

OF_LABELS = ("classes", "spans")  # tasks for which a teacher with a head has been fine-tuned
FAIR_START = ["student=pretrained", "student.path=MODEL"]
INHERITED = (
    "Both started from layers of a teacher that was fine-tuned for this task, so the baseline has learned from it: "
    f"a fair one, and its student, start from a pre-trained model ({' '.join(FAIR_START)})."
)


class Record(Part):
    """A run."""

    version: Literal[1] = field(1, "Of this schema.")
    recipe: str | None = field(None, "The recipe; null where the command named none.")
    command: str | None = field(None, "The command that trained it, without secrets.")
    started_in: str | None = sparse(
        None, "The working folder of the command, in which its relative paths mean what they do."
    )
    notes: list[str] = field([], "Sentences for the reader of the report.")
    identity: dict[str, Any] = field({}, "Settings by their names.")
    finished: bool = field(False, "Whether the student is published.")
    corpus: Corpus = field(Corpus(), "The text that it was trained on.")
    teacher: Teacher | None = field(None, "The teacher, and what it scored.")
    student: Student = field(Student(), "The student, and what it scored.")
    baseline: Baseline | None = field(
        None, "The same student trained without a teacher, where `evaluate.baseline` names its run."
    )
    agreement: dict[str, Agreement] | None = field(
        None, "How alike the predictions of student and teacher are, by evaluation set."
    )
    samples: Samples | None = sparse(None, "What the models write, where they are causal (`evaluate.samples`).")
    evaluation: dict[str, EvaluationSet] = field({}, "The evaluation sets.")
    objective: Objective = field(Objective(), "The loss.")
    optimizer: Optimizer = field(Optimizer(), "The optimizer.")
    measures: dict[str, Measure] = field({}, "What the measures are, by name.")
    training: Training = field(Training(), "What the training came to.")
    precision: dict[str, Any] = field({}, "The number formats, as chosen.")
    backend: Backend = field(Backend(), "The ranks.")
    environment: Environment = field(Environment(), "Where it ran.")
    history_by: str = field("epoch", "What the history is shown by, `epoch` or `step`.")
    history: list[HistoryPoint] = field([], "The evaluations in the course of the training.")
    best: Best | None = sparse(None, "The evaluation whose student is published, with `train.keep_best`.")
    snapshots: list[int] = field([], "The steps whose students are kept in `snapshots/`.")
    snapshot: int | None = sparse(None, "The step after which a student was kept that this describes.")
    profile: Profile | None = field(None, "Where the time went, with `profile=on`.")
    student_files: dict[str, str] = sparse({}, "SHA-256 of the files in student/, by name.")

    def to_json(self) -> dict[str, Any]:
        """What results.json holds."""
        return self.model_dump(mode="json")

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> "Record":
        """The record that `to_json` has written.

        Raises:
            SettingError: a value is of another kind than there belongs, or of another version.
        """
        try:
            return cls.model_validate(content)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            place = ".".join(map(str, first["loc"]))
            raise SettingError(first["msg"], setting=place, value=str(first["input"])[:40]) from None

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
        return self.changed(history=points, best=self.best and self.best.among(points))

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


def starts_fine_tuned(identity: Mapping[str, Any]) -> bool:
    """Whether the student of a run with this identity starts from layers of a teacher that has learned its task."""
    return identity.get("student.init") == "layers" and identity.get("objective.task") in OF_LABELS


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
