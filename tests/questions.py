"""Questions, contexts and answers that tests of SQuAD share: made here, or real ones where DISTILL_DATA is set."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from distill.data.tables.squad import Answer, Question, Questions, Squad

REAL = pytest.mark.skipif("DISTILL_DATA" not in os.environ, reason="real questions are not part of the project")
WORDS = [
    "the", "cat", "sat", "on", "a", "mat", "and", "an", "old", "dog", "ran", "to", "river", "bank", "found", "bones",
]  # fmt: skip
ODD = ["café", "naïve", "Zürich", "U.S.", "co-operate", "\u201cquoted\u201d", "$3.5", "İstanbul", "don't", "東京", "!"]


def made(count: int, version: str = "2.0", seed: int = 0, longest: int = 60, words: list[str] = WORDS) -> Questions:
    """Questions with up to three answers about contexts of 5 to `longest` words; of v2.0 a third has none."""
    random = np.random.default_rng(seed)
    found = []
    for number in range(count):
        context, places = "", []
        for word in random.choice(words, int(random.integers(5, longest))):
            context += " " * int(random.integers(1, 3)) if context else ""
            places.append((len(context), len(context) + len(word)))
            context += word
        answers = []
        for _ in range(int(random.integers(1, 4)) if version == "1.1" or random.random() < 0.67 else 0):
            first = int(random.integers(len(places)))
            last = min(first + int(random.integers(4)), len(places) - 1)
            place = places[first][0], places[last][1]
            answers.append(Answer(context[slice(*place)], place))
        question = " ".join(random.choice(words, int(random.integers(2, 9))))
        found.append(Question(f"q{number}", context, question, tuple(answers)))
    return Questions("made", version, tuple(found))


def real(version: str) -> Questions:
    """The development set of that version below $DISTILL_DATA."""
    return Squad(split="validation", version=version).read("squad.validation", training=False)


def predictions(questions: Questions, seed: int = 0) -> list[str]:
    """What models of all kinds might say: right, nearly right, wrong, nothing, in other letters, with other blanks."""
    random = np.random.default_rng(seed)

    def cut(text: str) -> str:
        words = text.split()
        return " ".join(words[int(random.integers(len(words))) :]) if words else ""

    changes = [
        lambda text, context: text,
        lambda text, context: text,
        lambda text, context: "",
        lambda text, context: cut(text),
        lambda text, context: f"The {text}, ",
        lambda text, context: text.upper(),
        lambda text, context: f" {text}\u00a0 {cut(context)[:30]}",
        lambda text, context: cut(context)[:40],
        lambda text, context: f"{text} é\u0301 東京 \u201c\u2014\u201d",
        lambda text, context: text.replace(" ", "-"),
        lambda text, context: " ".join([text] * 2),
        lambda text, context: "a",
    ]
    said = []
    for question in questions.questions:
        right = [answer.text for answer in question.answers] or [""]
        text = right[int(random.integers(len(right)))]
        said.append(changes[int(random.integers(len(changes)))](text, question.context))
    return said


def official(questions: Questions) -> dict[str, Any]:
    """The official JSON of these questions, one paragraph each."""
    paragraphs = []
    for question in questions.questions:
        answers = [{"text": a.text, "answer_start": a.place[0] if a.place else 0} for a in question.answers]
        item: dict[str, Any] = {"id": question.id, "question": question.question, "answers": answers}
        if questions.version == "2.0":
            item["is_impossible"] = not answers
        paragraphs.append({"context": question.context, "qas": [item]})
    return {"version": questions.version, "data": [{"title": "Made", "paragraphs": paragraphs}]}


def flat(questions: Questions) -> list[dict[str, Any]]:
    """The same as the Hub's records."""
    records = []
    for paragraph in official(questions)["data"][0]["paragraphs"]:
        (item,) = paragraph["qas"]
        answers = {name: [answer[name] for answer in item["answers"]] for name in ("text", "answer_start")}
        title = {"title": "Made", "context": paragraph["context"]}
        records.append({"id": item["id"], "question": item["question"], "answers": answers} | title)
    return records


def write(path: Path, content: Any) -> str:
    """JSON, one object a line where it is a list."""
    lines = [json.dumps(each) for each in content] if isinstance(content, list) else [json.dumps(content)]
    path.write_text("\n".join(lines), encoding="utf-8")
    return str(path)
