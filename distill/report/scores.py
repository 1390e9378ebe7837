"""The scores of several models as an object that shows itself: as a table, as Markdown, and as JSON."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic_core import to_jsonable_python

from distill.evaluation.conclusion import Conclusion
from distill.report.page import Code, Section, Table, markdown, prose, table_text
from distill.report.summary import AGREEMENT, explained
from distill.report.words import number
from distill.runs import facts
from distill.runtime.files import make_folder, quarantine, write_text
from distill.runtime.jsonl import without_nan

FILES = ("scores.json", "scores.md")


@dataclass(frozen=True)
class ModelScores:
    """One model and what it scored."""

    name: str  # as it was given
    model_class: str
    parameters: int
    bytes: int
    vocabulary: int  # which one of `Scores.vocabularies` it has
    scores: dict[str, dict[str, float]]  # by measure, then by evaluation set
    agreement: dict[str, dict[str, float]] | None = None  # with the teacher, by set: `top1` and `kl`


@dataclass(frozen=True)
class Vocabulary:
    """A vocabulary and the sets as it cuts them up: positions of two vocabularies are not the same ones."""

    tokens: int
    models: tuple[str, ...]
    sets: dict[str, facts.EvaluationSet]  # by name


@dataclass(frozen=True)
class Comparison:
    """One model against another on a set: whether what differs between them has made the first the better one."""

    model: str
    against: str
    measure: str
    set: str
    conclusion: Conclusion


@dataclass(frozen=True, repr=False)
class Scores:
    """What `distill.evaluate` gives; `print(scores)`, an interpreter and a notebook show it as a table.

    Attributes:
        task: what the models predict, as `objective.task`.
        models: each with its scores by measure and evaluation set as `.scores`; `scores["NAME"]` is one of them.
        vocabularies: of the models, each with the sets as it cuts them up.
        measures: by name.
        comparisons: of each model with the first one, in which each has a conclusion.
        notes: sentences for the reader.
        command: that gives the same.
        environment: versions and machine.
    """

    task: str
    models: tuple[ModelScores, ...]
    vocabularies: tuple[Vocabulary, ...]
    measures: dict[str, facts.Measure]
    comparisons: tuple[Comparison, ...] = ()
    notes: tuple[str, ...] = ()
    command: str = ""
    environment: facts.Environment = field(default_factory=facts.Environment)

    @property
    def sets(self) -> list[str]:
        """The names of the evaluation sets."""
        return list(dict.fromkeys(name for vocabulary in self.vocabularies for name in vocabulary.sets))

    def __getitem__(self, model: str) -> ModelScores:
        """The scores of a model by the name that it was given. Raises KeyError."""
        for scored in self.models:
            if scored.name == model:
                return scored
        raise KeyError(model)

    def as_dict(self) -> dict[str, Any]:
        """What scores.json holds; numbers that are not finite are null there."""
        content: dict[str, Any] = without_nan(to_jsonable_python(self))
        return content

    def _sections(self) -> list[Section]:
        return [
            Section("", [self._table(), explained(self.measures), [*self.notes]]),
            Section("One model against another", [self._compared()]),
            Section("What was scored", [self._scored(), Code(self.command, language="sh")]),
        ]

    def markdown(self) -> str:
        """The page: the table of all scores, what was scored, comparisons and notes."""
        return markdown("Scores", self._sections())

    def __str__(self) -> str:
        tables = filter(None, [self._table(), self._compared()])
        first, *others = ("\n\n".join(filter(None, [table_text(table), table.note])) for table in tables)
        return "\n\n".join([first, *self.notes, *others])

    __repr__ = __str__

    def _repr_markdown_(self) -> str:
        return self.markdown()

    def write(self, folder: Path) -> Path:
        """Write scores.json and scores.md; those of an earlier call are set aside as earlier-scores.*; the folder.

        Raises:
            SettingError: the folder cannot be written.
        """
        make_folder(folder, f"output={folder}")
        texts = (json.dumps(self.as_dict(), indent=1, allow_nan=False) + "\n", self.markdown())
        for name, text in zip(FILES, texts, strict=True):
            if (folder / name).exists():
                quarantine(folder / name, "earlier")
            write_text(folder / name, text)
        return folder

    def _table(self) -> Table:
        """Measures and sets down, models across."""
        models, sets = self.models, self.sets
        lines: list[tuple[str, list[float | None], Callable[[Any], str]]] = [
            ("Parameters", [model.parameters for model in models], number),
            ("Vocabulary (tokens)", [self.vocabularies[model.vocabulary].tokens for model in models], number),
        ]
        for measure, described in self.measures.items():
            for name in sets:
                values = [model.scores.get(measure, {}).get(name) for model in models]
                lines.append((f"{described.title}, {name}", values, number))
        for key, (title, form) in AGREEMENT.items():
            for name in sets:
                values = [(model.agreement or {}).get(name, {}).get(key) for model in models]
                lines.append((f"{title}, {name}", values, form))
        rows = [[title, *map(form, values)] for title, values, form in lines if {*values} - {None}]
        return Table(["", *(model.name for model in models)], rows)

    def _compared(self) -> Table:
        rows = []
        for compared in self.comparisons:
            found, title = compared.conclusion, self.measures[compared.measure].title
            rows.append([compared.model, compared.against, f"{title}, {compared.set}", found.word, found.reason])
        head = ["", "against", "measure and set", "what differs", "why"]
        return Table(head, rows, prose("compared"), text=True)

    def _scored(self) -> Table:
        rows = []
        for vocabulary in self.vocabularies:
            size = f" ({number(vocabulary.tokens)} tokens)" if len(self.vocabularies) > 1 else ""
            for name, scored in vocabulary.sets.items():
                sizes = (scored.documents, scored.sequences, scored.tokens, scored.positions, scored.pseudo_positions)
                rows.append([f"{name}{size}", str(scored.description), *map(number, sizes)])
        return Table(["", "text", "documents", "sequences", "tokens", "scored positions", "masked one at a time"], rows)
