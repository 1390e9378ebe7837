"""The record of a run: what it was, what it did and what came of it. Everything that shows a run reads this alone."""

import shlex
from typing import Any, Literal

from pydantic import ValidationError

from distill.runs import facts
from distill.runs.facts import Baseline, EvaluationSet, HistoryPoint, Measure, Model, Part, field, sparse
from distill.runtime.errors import SettingError
from distill.runtime.jsonl import LogLine
from distill.runtime.redaction import redacted

MODELS = ("teacher", "student", "baseline")  # in tables and figures, in this order
OF_LABELS = ("classes", "spans")  # tasks for which a teacher with a head has been fine-tuned
FAIR_TEACHER = ["teacher=pretrained", "teacher.path=MODEL"]
INHERITED = (
    "The baseline has seen the teacher: it started from layers of a model that was fine-tuned for this task. A fair "
    f"one starts from the same layers of the model that this was fine-tuned from ({' '.join(FAIR_TEACHER)})."
)

LEFT = ("bootstrap", "curve")  # of a baseline in records of earlier versions, where they would be read as measures


class Record(Part):
    """A run.

    A part without any known value is an empty one; only a model that a run does not have, and what hangs on it, is
    None as a whole.
    """

    version: Literal[1] = field(1, "Of this schema.")
    recipe: str | None = field(None, "The recipe; null where the command named none.")
    command: str | None = field(None, "The command that trained it, without secrets.")
    started_in: str | None = sparse(None, "The working folder of the command, from which its relative paths lead.")
    notes: list[str] = field([], "Sentences for the reader of the report.")
    identity: dict[str, Any] = field({}, "Settings by their names.")
    finished: bool = field(False, "Whether the student is published.")
    corpus: facts.Corpus = field(facts.Corpus(), "The text that it was trained on.")
    teacher: facts.Teacher | None = field(None, "The teacher, and what it scored.")
    student: facts.Student = field(facts.Student(), "The student, and what it scored.")
    baseline: Baseline | None = field(None, "The same student trained without a teacher (`evaluate.baseline`).")
    agreement: dict[str, facts.Agreement] | None = field(None, "Of student and teacher, by evaluation set.")
    samples: facts.Samples | None = sparse(None, "What the models write, where they are causal (`evaluate.samples`).")
    evaluation: dict[str, EvaluationSet] = field({}, "The evaluation sets.")
    objective: facts.Objective = field(facts.Objective(), "The loss.")
    optimizer: facts.Optimizer = field(facts.Optimizer(), "The optimizer.")
    measures: dict[str, Measure] = field({}, "What the measures are, by name.")
    training: facts.Training = field(facts.Training(), "What the training came to.")
    precision: dict[str, Any] = field({}, "The number formats, as chosen.")
    backend: facts.Backend = field(facts.Backend(), "The ranks.")
    environment: facts.Environment = field(facts.Environment(), "Where it ran.")
    history_by: str = field("epoch", "What the history is shown by, `epoch` or `step`.")
    history: list[HistoryPoint] = field([], "The evaluations in the course of the training.")
    best: facts.Best | None = sparse(None, "The evaluation whose student is published, with `train.keep_best`.")
    snapshots: list[int] = field([], "The steps whose students are kept in `snapshots/`.")
    snapshot: int | None = sparse(None, "The step after which a student was kept that this describes.")
    profile: facts.Profile | None = field(None, "Where the time went, with `profile=on`.")
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
        if isinstance(baseline := content.get("baseline"), dict):
            content = content | {"baseline": {name: value for name, value in baseline.items() if name not in LEFT}}
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
        names = (word.partition("=")[0].lstrip("+~") for word in shlex.split(self.command or ""))
        changed = {name.partition(".")[0] for name in names}
        return [group for group in ("corpus", "teacher", "student", "objective") if group in changed]

    def redacted(self) -> "Record":
        """This record without secrets in its texts."""
        return Record.from_json(redacted(self.to_json()))

    def with_history(self, lines: list[LogLine]) -> "Record":
        """This record with these lines of history.jsonl, and the best of them."""
        points = [HistoryPoint.model_validate(line) for line in lines]
        return self.changed(history=points, best=self.best and self.best.among(points))

    @property
    def first_measure(self) -> tuple[str, Measure]:
        """Name and description of the measure that decides which of two models is better; empty ones without any."""
        return next(iter(self.measures.items()), ("", Measure()))

    @property
    def starts_fine_tuned(self) -> bool:
        """Whether the student starts from layers of a teacher that has learned its task."""
        is_of_labels = self.identity.get("objective.task") in OF_LABELS
        return is_of_labels and self.identity.get("student.init") == "layers" and not self.student.start.new_head

    def models(self) -> dict[str, Model]:
        """The teacher, student and baseline that the run has, by their names in figures and tables."""
        return {name: model for name in MODELS if (model := getattr(self, name)) is not None}

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
        values = [scored.scores.get(measure, {}) for scored in (*self.models().values(), *self.history)]
        names = dict.fromkeys(name for by_set in values for name, value in by_set.items() if value is not None)
        in_order = [*(name for name in self.evaluation if name in names), *names]
        return [name for name in dict.fromkeys(in_order) if self.is_scored(name)]


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
