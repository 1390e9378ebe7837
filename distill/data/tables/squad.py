"""Questions about paragraphs whose answers are stretches of these: SQuAD v1.1 and v2.0, and data in their forms.

Read are the official JSON (articles, paragraphs, questions), a list of flat records under its key `data`, and flat
records (id, context, question, answers {text, answer_start}) in JSONL and Parquet files and on the Hub. Rajpurkar et
al. 2016, 2018.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np

from distill.data import readers
from distill.data.lines import Record, plain_name
from distill.data.readers import InvalidFile
from distill.data.tables import Split, TableConfig, describe, find_split, find_unlabelled, reasons_listed
from distill.data.tables._rows import Row, kind_of, read_files, read_rows
from distill.runtime.errors import SettingError
from distill.runtime.progress import counted

HUB = {"1.1": "rajpurkar/squad", "2.0": "rajpurkar/squad_v2"}
SUFFIXES = (".json", ".json.gz", ".jsonl", ".jsonl.gz", ".parquet")
COLUMNS = ("id", "context", "question", "answers")


class Answer(NamedTuple):
    """An answer that counts as right."""

    text: str
    place: tuple[int, int] | None  # its characters [begin, end) of the context; None: it is not in there


@dataclass(frozen=True)
class Question:
    """A question about a context."""

    id: str
    context: str
    question: str
    answers: tuple[Answer, ...]  # none: the context does not answer it

    @property
    def place(self) -> tuple[int, int] | None:
        """Where the first of its answers stands that is in the context."""
        return next((answer.place for answer in self.answers if answer.place is not None), None)


@dataclass(frozen=True)
class Questions:
    """The questions of a split."""

    name: str  # as they describe themselves
    version: str  # 1.1 or 2.0: whether some of them may have no answer, and by which script they are scored
    questions: tuple[Question, ...]
    moved: int = 0  # answers that stand elsewhere in their context than in the data
    left_out: Counter[str] = field(default_factory=Counter)  # questions that training does without, by reason

    @property
    def lost(self) -> int:
        """Questions of an evaluation set of whose answers none is in its context; they are scored all the same."""
        return sum(bool(question.answers) and question.place is None for question in self.questions)

    def __len__(self) -> int:
        return len(self.questions)

    @property
    def texts(self) -> list[tuple[str, ...]]:
        """The texts that a model reads, by question."""
        return [(question.context, question.question) for question in self.questions]

    def take(self, numbers: np.ndarray) -> Self:
        """Those of these numbers, in that order."""
        return replace(self, questions=tuple(self.questions[number] for number in numbers), moved=0)

    def describe(self) -> str:
        """For example `4,371 questions of train-v1.1.json (v1.1); 2 left out: no answer in its context`."""
        moved = f"; {counted(self.moved, 'answer')} found elsewhere in their context" if self.moved else ""
        lost = f"; {self.lost:,} without an answer in their context, scored all the same" if self.lost else ""
        end = f"{moved}{lost}{reasons_listed(self.left_out, 'left out')}"
        return f"{counted(len(self), 'question')} of {self.name} (v{self.version}){end}"


@dataclass
class Squad(Split):
    """Questions of either version, and how their contexts are cut into windows.

    `version`: that of the data: 1.1, or 2.0 with questions that the context does not answer. `stride`: tokens from the
    beginning of one window of a context to that of the next, if windows then overlap, else half a window. `max_query`:
    tokens of a question; the rest is cut off.
    """

    version: str = "1.1"
    stride: int = 128
    max_query: int = 64

    def read(self, setting: str, training: bool, like: Any | None = None) -> Questions:
        return read(self, self.version, setting, training)

    def read_unlabelled(self, path: str, setting: str) -> Questions:
        return read_unlabelled(path, self.version, setting)


def read(table: TableConfig, version: str, setting: str, training: bool) -> Questions:
    """The questions of a split.

    Args:
        version: 1.1 or 2.0; in the former every question has an answer.
        setting: what error lines call `table`.
        training: leave out, and count, questions that cannot be used or whose answers are not in their context. In
            evaluation all of them count, and one that is no question at all is an error.

    Raises:
        SettingError: there are no such questions, or they do not fit `version`.
    """
    if version not in HUB:
        raise SettingError(f"{setting}: version={version} is not known: choose 1.1 or 2.0")
    usual = ("squad",) if table.hub in (None, HUB[version]) else ()  # of another data set it is no copy
    table = TableConfig(table.path, table.hub or HUB[version], table.subset, table.split)
    files = [path for path in find_split(table, setting, SUFFIXES, usual) if _fits(path, version)]
    if table.path is not None and not files:
        raise SettingError(
            f"{setting}.path={table.path}: only files of another version than {version} are there; give other files, "
            f"or set {setting}.version"
        )
    questions: list[Question] = []
    left_out: Counter[str] = Counter()
    moved = 0
    for place, record in _records(table, setting, files):
        try:
            question, elsewhere = _question(record, training)
        except ValueError as error:
            if not training:
                raise SettingError(f"{setting}: {place}: {error}; mend it (every question is scored)") from error
            left_out[str(error)] += 1
            continue
        questions.append(question)
        moved += elsewhere
    if not questions:
        reasons = reasons_listed(left_out, "left out") or "; it is empty"
        raise SettingError(f"{setting}: {describe(table, files)} has not one question to use{reasons}; check the files")
    unanswered = sum(not question.answers for question in questions)
    if version == "1.1" and unanswered:
        raise SettingError(
            f"{setting}: {unanswered:,} of {len(questions):,} questions have no answer, which only version 2.0 has; "
            "set the version to 2.0, or give other files"
        )
    return Questions(describe(table, files), version, tuple(questions), moved, left_out)


def read_unlabelled(path: str, version: str, setting: str) -> Questions:
    """The questions of files of either version, without their answers; a context and a question are all they need.

    Raises:
        SettingError: there are none.
    """
    files = find_unlabelled(path, setting, SUFFIXES)
    if others := [file for file in files if not plain_name(file.name).endswith(SUFFIXES)]:
        raise SettingError(
            f"{setting}={others[0]}: questions with contexts come as {', '.join(SUFFIXES[::2])} files; give one"
        )
    questions: list[Question] = []
    left_out: Counter[str] = Counter()
    for file in files:
        fields = {f"{setting}.{column}": column for column in ("context", "question")}
        flat = (_of_row(row) for row in read_files([file], setting, fields))
        for place, record in of_json(file, setting) if kind_of(file) == "json" else flat:
            try:
                question, _ = _question(record | {"id": place, "answers": [], "is_impossible": None}, training=True)
            except ValueError as error:
                left_out[str(error)] += 1
                continue
            questions.append(question)
    name = describe(TableConfig(), files)
    if not questions:
        reasons = reasons_listed(left_out, "left out") or "; it is empty"
        raise SettingError(f"{setting}: {name} has not one question to use{reasons}; check the files")
    return Questions(name, version, tuple(questions), left_out=left_out)


def _fits(path: Path, version: str) -> bool:
    """Whether a file's name names no other version."""
    return not any(f"v{other}" in path.name for other in HUB if other != version)


def _records(table: TableConfig, setting: str, files: list[Path]) -> Iterator[tuple[str, Record]]:
    """Every question as a flat record, and where it stands."""
    fields = {f"{setting}.{column}": column for column in COLUMNS}
    json_files = [path for path in files if kind_of(path) == "json"]
    for path in json_files:
        yield from of_json(path, f"{setting}.path")
    if json_files and len(json_files) == len(files):
        return
    for row in read_rows(table, setting, [path for path in files if path not in json_files], fields):
        yield _of_row(row)


def _of_row(row: Row) -> tuple[str, Record]:
    assert row.values is not None  # no file of separated fields is among them
    answers = row.values.get("answers")
    if isinstance(answers, dict):  # columns of texts and places, turned into the official list of pairs
        texts, starts = answers.get("text"), answers.get("answer_start")
        if isinstance(texts, list) and isinstance(starts, list) and len(texts) == len(starts):
            answers = [{"text": text, "answer_start": start} for text, start in zip(texts, starts, strict=True)]
    return row.place, {**row.values, "answers": answers}


def of_json(path: Path, setting: str) -> Iterator[tuple[str, Record]]:
    """The questions of one JSON document; `setting` names it."""
    try:
        content = json.loads("".join(readers.lines(path)))
    except InvalidFile as error:
        raise SettingError(f"{setting}={path}: {error}; mend or remove that") from error
    except (ValueError, RecursionError) as error:
        raise SettingError(
            f"{setting}={path}: not JSON ({error}); mend it, or call a file of one object a line *.jsonl"
        ) from error
    try:
        for number, article in enumerate(content["data"], 1):
            if "paragraphs" not in article:
                yield _of_row(Row(f"{path.name}, question {number}", dict.fromkeys(COLUMNS) | article))
                continue
            for paragraph in article["paragraphs"]:
                for question in paragraph["qas"]:
                    place = f"{path.name}, question {question.get('id')}"
                    yield place, dict.fromkeys(COLUMNS) | question | {"context": paragraph["context"]}
    except (KeyError, TypeError, AttributeError) as error:
        raise SettingError(
            f"{setting}={path}: not in SQuAD's form, data > paragraphs > qas ({type(error).__name__}: {error}); mend it"
        ) from error


def _question(record: Record, training: bool) -> tuple[Question, int]:
    """A question, and how many of its answers stand elsewhere than its record has them.

    Raises:
        ValueError: it cannot be used; with the reason.
    """
    context, question, records = record["context"], record["question"], record["answers"]
    if record["id"] is None:
        raise ValueError("no id")
    for name, text in (("context", context), ("question", question)):
        if not isinstance(text, str) or not text.strip():
            raise ValueError(f"no {name}")
        if not readers.has_utf8(text):
            raise ValueError(f"half a surrogate pair in its {name}")
    if not isinstance(records, list) or not all(isinstance(answer, dict) for answer in records):
        raise ValueError("its answers are no list of texts with their places")
    if not all(isinstance(answer.get("text"), str) for answer in records):
        raise ValueError("an answer without text")
    impossible = record.get("is_impossible")
    if training and impossible is not None and bool(impossible) == bool(records):
        raise ValueError("is_impossible contradicts its answers")
    answers = tuple(Answer(entry["text"], find(entry["text"], context, entry.get("answer_start"))) for entry in records)
    if training and answers and all(answer.place is None for answer in answers):
        raise ValueError("no answer in its context")
    elsewhere = sum(
        answer.place is not None and answer.place[0] != entry.get("answer_start")
        for answer, entry in zip(answers, records, strict=True)
    )
    return Question(str(record["id"]), context, question, answers), elsewhere


def find(text: str, context: str, start: Any) -> tuple[int, int] | None:
    """The characters of the context that are the text: at `start`, else the nearest place where it stands.

    White space, and after that the case of letters, may differ where it stands nowhere as it is. None: nowhere.
    """
    start = start if isinstance(start, int) and not isinstance(start, bool) else 0
    if not text.strip():
        return None
    if start >= 0 and context.startswith(text, start):
        return start, start + len(text)
    pattern = r"\s+".join(map(re.escape, text.split()))
    for flags in (re.NOFLAG, re.IGNORECASE):
        if spans := [match.span() for match in re.finditer(pattern, context, flags)]:
            return min(spans, key=lambda span: abs(span[0] - start))
    return None
