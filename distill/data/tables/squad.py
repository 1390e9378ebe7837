"""Questions about paragraphs whose answers are stretches of these: SQuAD v1.1 and v2.0, and data in their forms.

Read are the official JSON (articles, paragraphs, questions), a list of flat records under its key `data`, and flat
records (id, context, question, answers {text, answer_start}) in JSONL and Parquet files and on the Hub. Rajpurkar et
al. 2016, 2018.
"""

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any, NamedTuple, Self

import numpy as np

from distill.data.find_files import File
from distill.data.tables import Split, find_tables, name_of
from distill.data.tables._rows import Columns, Record, Rows, file_rows, kind_of, rows_of
from distill.runtime.errors import SettingError, first_line
from distill.runtime.progress import counted

HUB = {"1.1": "rajpurkar/squad", "2.0": "rajpurkar/squad_v2"}
ENDINGS = (".json", ".jsonl", ".parquet")
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
    left_out: int = 0  # questions that training does without

    def __len__(self) -> int:
        return len(self.questions)

    @property
    def texts(self) -> list[tuple[str, ...]]:
        """The texts that a model reads, by question."""
        return [(question.context, question.question) for question in self.questions]

    def take(self, numbers: np.ndarray) -> Self:
        """Those of these numbers, in that order."""
        return replace(self, questions=tuple(self.questions[number] for number in numbers))

    def describe(self) -> str:
        """For example `4,371 questions of train-v1.1.json (v1.1); 2 left out, which cannot be used`."""
        left_out = f"; {self.left_out:,} left out, which cannot be used" if self.left_out else ""
        return f"{counted(len(self), 'question')} of {self.name} (v{self.version}){left_out}"


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
        """As of every split. Evaluation scores all questions, also those whose answers are not in their context."""
        if self.version not in HUB:
            raise SettingError(f"{setting}: version={self.version} is not known: choose 1.1 or 2.0")
        place = replace(self, hub=self.hub or HUB[self.version])
        usual = ("squad",) if place.hub == HUB[self.version] else ()  # of another data set it is no copy
        others = [f"v{version}" for version in HUB if version != self.version]
        files = place.files(setting, ENDINGS, usual)
        files = [file for file in files if not any(other in file.name for other in others)]
        if self.path is not None and not files:
            raise SettingError(
                f"{setting}.path={self.path}: only files of another version than {self.version} are there; give other "
                f"files, or set {setting}.version"
            )
        columns = {f"{setting}.{column}": column for column in COLUMNS}
        records = _of_files(files, f"{setting}.path", columns) if files else _flat(rows_of(place, (), setting, columns))
        found = _collect(records, self.version, place.place(files), setting, training)
        unanswered = sum(not question.answers for question in found.questions)
        if self.version == "1.1" and unanswered:
            raise SettingError(
                f"{setting}: {unanswered:,} of {len(found):,} questions have no answer, which only version 2.0 has; "
                "set the version to 2.0, or give other files"
            )
        return found

    def read_unlabelled(self, path: str, setting: str) -> Questions:
        """A context and a question are all that a record needs."""
        files = find_tables(path, setting, "unlabelled", ENDINGS)
        columns = {f"{setting}.{column}": column for column in ("context", "question")}
        bare: Record = {"answers": [], "is_impossible": None}
        records = ((at, {**record, "id": at, **bare}) for at, record in _of_files(files, setting, columns))
        return _collect(records, self.version, name_of(files), setting, training=True)


def _of_files(files: Sequence[File], setting: str, columns: Columns) -> Iterator[tuple[str, Record]]:
    """Every question of these files, which `setting` names, as a flat record, and where it stands."""
    for file in files:
        is_json = kind_of(file.place) == "json"
        yield from _official(file, setting) if is_json else _flat([file_rows(file, setting, columns)])


def _flat(sets: Iterable[Rows]) -> Iterator[tuple[str, Record]]:
    return ((f"{rows.name}, row {n}", record) for rows in sets for n, record in enumerate(rows.records, 1))


def _official(file: File, setting: str) -> Iterator[tuple[str, Record]]:
    """The questions of one JSON document, of articles or of flat records."""
    import fsspec

    try:
        with fsspec.open(file.place, encoding="utf-8", compression="infer", mode="rt") as opened:
            content = json.load(opened)
    except (OSError, EOFError, ValueError, RecursionError) as error:
        cure = "mend it, or call a file of one object a line *.jsonl"
        raise SettingError(f"not JSON ({first_line(error)})", setting=setting, value=file.place, cure=cure) from error
    try:
        for article in content["data"]:
            for paragraph in article.get("paragraphs", [{"qas": [article]}]):
                for question in paragraph["qas"]:
                    place = f"{file.name}, question {question.get('id')}"
                    yield place, dict.fromkeys(COLUMNS) | paragraph | question
    except (KeyError, TypeError, AttributeError) as error:
        problem = f"not in SQuAD's form, data > paragraphs > qas ({type(error).__name__}: {error})"
        raise SettingError(problem, setting=setting, value=file.place, cure="mend it") from error


def _collect(records: Iterable[tuple[str, Record]], version: str, name: str, setting: str, training: bool) -> Questions:
    """The questions of records. Training does without what cannot be used and counts it; in evaluation it is an error.

    Raises:
        SettingError: of no question, too.
    """
    questions: list[Question] = []
    left_out, reason = 0, "it is empty"
    for place, record in records:
        try:
            questions.append(_question(record, training))
        except ValueError as error:
            if not training:
                raise SettingError(f"{setting}: {place}: {error}; mend it (every question is scored)") from error
            left_out, reason = left_out + 1, str(error)
    if not questions:
        raise SettingError(f"{setting}: {name} has not one question to use: {reason}; check the files")
    return Questions(name, version, tuple(questions), left_out)


def _question(record: Record, training: bool) -> Question:
    """A question. Raises ValueError with the reason where it cannot be used."""
    context, question, records = record["context"], record["question"], record["answers"]
    if record["id"] is None:
        raise ValueError("no id")
    for name, text in (("context", context), ("question", question)):
        if not isinstance(text, str) or not text.strip():
            raise ValueError(f"no {name}")
        text.encode()  # raises for half a surrogate pair
    if isinstance(records, dict) and isinstance(records.get("text"), list):  # in flat records columns of both
        both = zip_longest(records["text"], records.get("answer_start") or [])
        records = [{"text": text, "answer_start": start} for text, start in both]
    if not isinstance(records, list) or not all(
        isinstance(each, dict) and isinstance(each.get("text"), str) for each in records
    ):
        raise ValueError("its answers are no list of texts with their places")
    impossible = record.get("is_impossible")  # some data have answers there that are merely plausible
    if training and impossible is not None and bool(impossible) == bool(records):
        raise ValueError("is_impossible contradicts its answers")
    answers = tuple(Answer(each["text"], find(each["text"], context, each.get("answer_start"))) for each in records)
    if training and answers and all(answer.place is None for answer in answers):
        raise ValueError("no answer in its context")
    return Question(str(record["id"]), context, question, answers)


def find(text: str, context: str, start: Any) -> tuple[int, int] | None:
    """The characters of the context that are the text, where it stands nearest to `start`; None: nowhere."""
    start = start if isinstance(start, int) else 0
    begins = [match.start() for match in re.finditer(f"(?={re.escape(text)})", context)] if text.strip() else []
    begin = min(begins, key=lambda begin: abs(begin - start), default=None)
    return None if begin is None else (begin, begin + len(text))
