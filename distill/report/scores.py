"""The scores of several models as an object that shows itself: as a table, as Markdown, and as JSON."""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from distill.evaluation.significance import Bootstrap
from distill.report.page import Code, escaped
from distill.report.summary import AGREEMENT, explained, in_points, interval
from distill.report.words import NONE, number, percent
from distill.runs import facts
from distill.runtime.errors import SettingError
from distill.runtime.files import atomic, quarantine
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
    """One model against another on a set, by paired bootstrap resampling."""

    model: str
    against: str
    measure: str
    set: str
    bootstrap: Bootstrap


@dataclass(frozen=True, repr=False)
class Scores:
    """What `distill.evaluate` gives; `print(scores)`, an interpreter and a notebook show it as a table.

    Attributes:
        task: what the models predict, as `objective.task`.
        models: each with its scores by measure and evaluation set as `.scores`; `scores["NAME"]` is one of them.
        vocabularies: of the models, each with the sets as it cuts them up.
        measures: by name.
        comparisons: of each model with the first one, by the paired bootstrap.
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
        content: dict[str, Any] = without_nan(asdict(self))
        return content

    def markdown(self) -> str:
        """The page: the table of all scores, what was scored, comparisons and notes."""
        parts = ["# Scores", _table(self._rows(), escaped), escaped(explained(self.measures))]
        parts += ["\n".join(f"- {escaped(note)}" for note in self.notes)] if self.notes else []
        if self.comparisons:
            parts += ["## One model against another", _table(self._compared(), escaped), COMPARED]
        parts += ["## What was scored", _table(self._scored(), escaped)]
        fence = Code(self.command).fence
        parts += [f"{fence}sh\n{self.command}\n{fence}"] if self.command else []
        return "\n\n".join(part for part in parts if part) + "\n"

    def __str__(self) -> str:
        parts = [_table(self._rows()), *self.notes]
        parts += [_table(self._compared()), COMPARED] if self.comparisons else []
        return "\n\n".join(parts)

    __repr__ = __str__

    def _repr_markdown_(self) -> str:
        return self.markdown()

    def write(self, folder: Path) -> Path:
        """Write scores.json and scores.md; those of an earlier call are set aside as earlier-scores.*; the folder.

        Raises:
            SettingError: the folder cannot be written.
        """
        check_folder(folder)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SettingError(f"output={folder} is no folder that can be made: {error.strerror}") from error
        texts = (json.dumps(self.as_dict(), indent=1, allow_nan=False) + "\n", self.markdown())
        for name, text in zip(FILES, texts, strict=True):
            if (folder / name).exists():
                quarantine(folder / name, "earlier")
            with atomic(folder / name) as new:
                new.write_text(text, encoding="utf-8")
        return folder

    def _rows(self) -> Iterator[list[str]]:
        """Measures and sets down, models across."""
        yield ["", *(model.name for model in self.models)]
        yield ["Parameters", *(number(model.parameters) for model in self.models)]
        yield ["Vocabulary (tokens)", *(number(self.vocabularies[model.vocabulary].tokens) for model in self.models)]
        for measure, described in self.measures.items():
            for name in self.sets:
                values = [model.scores.get(measure, {}).get(name) for model in self.models]
                if any(value is not None for value in values):
                    yield [f"{described.title}, {name}", *map(number, values)]
        for key, (title, form) in AGREEMENT.items():
            for name in self.sets:
                values = [(model.agreement or {}).get(name, {}).get(key) for model in self.models]
                if any(value is not None for value in values):
                    yield [f"{title}, {name}", *(NONE if value is None else form(value) for value in values)]

    def _compared(self) -> Iterator[list[str]]:
        yield ["", "against", "measure and set", "difference", "95 % interval", "better in", "drawn"]
        for comparison in self.comparisons:
            bootstrap = comparison.bootstrap
            title = self.measures[comparison.measure].title
            cells = [
                f"{title}, {comparison.set}",
                f"{bootstrap.ratio:.3f} times" if bootstrap.points is None else in_points(bootstrap.points),
                interval(bootstrap.low, bootstrap.high, bootstrap.points is not None),
                percent(bootstrap.better, 1),
            ]
            yield [comparison.model, comparison.against, *cells, f"{number(bootstrap.num_units)} {bootstrap.units}"]

    def _scored(self) -> Iterator[list[str]]:
        yield ["", "text", "documents", "sequences", "tokens", "scored positions", "masked one at a time"]
        for vocabulary in self.vocabularies:
            size = f" ({number(vocabulary.tokens)} tokens)" if len(self.vocabularies) > 1 else ""
            for name, scored in vocabulary.sets.items():
                sizes = (scored.documents, scored.sequences, scored.tokens, scored.positions, scored.pseudo_positions)
                yield [f"{name}{size}", str(scored.description), *map(number, sizes)]


def check_folder(output: str | Path) -> None:
    """Refuse an output in which no scores can be written; nothing is made.

    Raises:
        SettingError: it is empty, a file is in the way, or the folder or the one that it would be made in is read-only.
    """
    if not str(output).strip():
        raise SettingError("output= is empty (a shell variable that is not set?): give a folder")
    folder = Path(output).expanduser().absolute()
    existing = next(parent for parent in (folder, *folder.parents) if os.path.exists(parent))
    if not existing.is_dir():
        raise SettingError(f"output={output} is no folder that can be made: {existing} is a file; give another folder")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise SettingError(f"output={output} cannot be written: {existing} is read-only; give another folder")


COMPARED = (
    "A ratio of perplexities below 1, or a difference of accuracies above 0, is in favour of the model in the first "
    "column. Both models were scored on the same 10,000 draws of the set, unit by unit and with replacement (Koehn "
    "2004): the interval holds 95 % of these, and the next column says in how many draws the model is the better one; "
    "a tie counts half."
)


def _plain(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _table(rows: Iterator[list[str]] | Sequence[list[str]], written: Callable[[str], str] = _plain) -> str:
    """A Markdown table whose columns are below each other, so that it reads well on a console too.

    Args:
        written: how a cell is; on a console its marks stand as they are.
    """
    cells = [[written(cell) for cell in row] for row in rows]
    widths = [max(3, *(len(row[column]) for row in cells)) for column in range(len(cells[0]))]
    lines = [
        "| " + " | ".join((str.rjust if n else str.ljust)(cell, widths[n]) for n, cell in enumerate(row)) + " |"
        for row in cells
    ]
    rule = "|" + "|".join("-" * (width + 1) + (":" if n else "-") for n, width in enumerate(widths)) + "|"
    return "\n".join([lines[0], rule, *lines[1:]])
