"""Exact match and F1 of SQuAD against torchmetrics, an implementation of its own, and against the official rules."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import questions as sample
from torchmetrics.functional.text import squad as torchmetrics_squad

from distill.data.tables.squad import Answer, Question, Questions
from distill.evaluation.questions import Answered, Candidate, SquadSet, normalised, raw_scores, score, score_texts


def by_torchmetrics(questions: Questions, texts: list[str]) -> np.ndarray:
    """[questions, 2] exact match and F1, question by question; without an answer the right text is an empty one.

    It follows the script of v2.0: two texts that are empty once normalised have F1 1, and of v1.1 0.
    """
    found = []
    for question, text in zip(questions.questions, texts, strict=True):
        right = [answer.text for answer in question.answers]
        if questions.version == "2.0":
            right = [answer for answer in right if normalised(answer)] or [""]
        target: Any = {"answers": {"text": right, "answer_start": [0] * len(right)}, "id": question.id}
        values = torchmetrics_squad({"prediction_text": text, "id": question.id}, target)
        found.append((float(values["exact_match"]), float(values["f1"])))
    return np.array(found)


def check_against_torchmetrics(questions: Questions) -> None:
    texts = sample.predictions(questions)
    expected, found = by_torchmetrics(questions, texts), 100 * raw_scores(questions, texts)
    if questions.version == "1.1":
        empty = [
            not normalised(text) and any(not normalised(answer.text) for answer in question.answers)
            for question, text in zip(questions.questions, texts, strict=True)
        ]
        assert (found[empty, 1] == 0).all()
        expected[empty, 1] = 0
    np.testing.assert_allclose(found, expected, atol=1e-4)  # torchmetrics rounds to float32
    assert 20 < found[:, 0].mean() < found[:, 1].mean() < 80  # right, wrong and half right ones are among them
    assert ((found[:, 1] > 0) & (found[:, 1] < 100)).sum() > 50
    scores = score_texts(questions, texts)
    assert scores["exact"] == pytest.approx(found[:, 0].mean()) and scores["f1"] == pytest.approx(found[:, 1].mean())


@pytest.mark.parametrize("version", ["1.1", "2.0"])
def test_made_predictions_score_as_in_torchmetrics(version: str) -> None:
    check_against_torchmetrics(sample.made(1500, version, longest=20, words=[*sample.WORDS, *sample.ODD]))


@sample.REAL
@pytest.mark.parametrize("version", ["1.1", "2.0"])
def test_predictions_for_real_questions_score_as_in_torchmetrics(version: str) -> None:
    questions = sample.real(version)
    assert len(questions) > 6000
    check_against_torchmetrics(questions)


def asked(version: str, *answers: str) -> Questions:
    return Questions("x", version, (Question("1", "context", "question", tuple(Answer(a, None) for a in answers)),))


@pytest.mark.parametrize(
    ("text", "answers", "exact", "f1"),
    [
        ("The  Cat.", ["cat"], 100, 100),
        ("a cat and an owl", ["cat and owl"], 100, 100),
        ("theatre", ["atre"], 0, 0),  # an article inside a word stays
        ("cat dog", ["cat", "cat owl", "dog fox bird"], 0, 200 / 3),  # the best of several, not their mean
        ("cat cat", ["cat"], 0, 200 / 3),  # a word counts as often as it is there
        ("U.S.", ["us"], 100, 100),
        ("co-operate", ["cooperate"], 100, 100),
        ("\u2014cat", ["cat"], 0, 0),  # only punctuation of ASCII is removed
        ("ÉCOLE", ["école"], 100, 100),
        ("cat\u00a0\u2003dog", ["cat dog"], 100, 100),
        ("", ["cat"], 0, 0),
    ],
)
@pytest.mark.parametrize("version", ["1.1", "2.0"])
def test_rules_of_both_versions(version: str, text: str, answers: list[str], exact: float, f1: float) -> None:
    scores = score_texts(asked(version, *answers), [text])
    assert (scores["exact"], scores["f1"]) == (exact, pytest.approx(f1))


def test_where_the_versions_differ() -> None:
    """The scripts treat answers of articles alone differently; only v2.0 knows questions without an answer."""
    for version, expected in (("1.1", (100, 0)), ("2.0", (100, 100))):
        scores = score_texts(asked(version, "the"), ["a"])
        assert (scores["exact"], scores["f1"]) == expected
    assert score_texts(asked("2.0"), [""])["no_answer_exact"] == 100
    assert score_texts(asked("2.0"), ["the"])["exact"] == 100  # normalised it says nothing
    assert score_texts(asked("2.0"), ["cat"])["exact"] == 0
    assert score_texts(asked("2.0", "the", "cat"), [""])["exact"] == 0  # "the" is no answer, "cat" is


def answered(text: str, odds: float) -> Answered:
    """An answer whose score is 0, so that its null score is its odds."""
    return Answered((Candidate(text, 0.0, (0, len(text))),), odds)


def predicted(count: int = 400, seed: int = 0, distinct: bool = True) -> tuple[Questions, list[Answered]]:
    """What a model might say, more often with large odds where there is no answer."""
    words = sorted({*sample.WORDS, *sample.ODD} - {"a", "an", "the", "!"})
    made, random = sample.made(count, seed=seed, words=words), np.random.default_rng(seed)
    has = np.array([bool(question.answers) for question in made.questions])
    odds = random.normal(size=count) - has
    odds = odds if distinct else odds.round()
    texts = [text if normalised(text) else "cat" for text in sample.predictions(made)]
    return made, [answered(*each) for each in zip(texts, odds.tolist(), strict=True)]


def at(threshold: float, said: list[Answered]) -> list[str]:
    """The answers where a question whose odds are above the threshold stays unanswered."""
    return [each.text if each.null_odds <= threshold else "" for each in said]


def official_best(scores: np.ndarray, has: np.ndarray, texts: list[str], odds: np.ndarray) -> float:
    """The loop that the official script describes, over different odds: the best score.

    It takes a text such as "the" for an answer, which its scores take for none; there is no such text here.
    """
    current = best = float((~has).sum())
    for number in np.argsort(odds):
        current += scores[number] if has[number] else (-1.0 if texts[number] else 0.0)
        best = max(best, current)
    return 100 * best / len(scores)


def test_the_tuned_score_is_the_official_one() -> None:
    made, said = predicted(1000)
    has = np.array([bool(question.answers) for question in made.questions])
    texts, odds = [each.text for each in said], np.array([each.null_odds for each in said])
    raw = raw_scores(made, texts)
    scores = score(made, said)
    for column, name in ((0, "best_exact"), (1, "best_f1")):
        assert scores[name] == pytest.approx(official_best(raw[:, column], has, texts, odds), abs=1e-9)


@pytest.mark.parametrize(("kept", "lacking"), [(True, "no_answer_exact"), (False, "has_answer_f1")])
def test_a_set_has_the_measures_of_its_kinds_of_questions(kept: bool, lacking: str) -> None:
    """A set of v2.0 may be one in which every question has an answer, or none has."""
    made = sample.made(80, "2.0", longest=20, words=sample.WORDS)
    some = replace(made, questions=tuple(question for question in made.questions if bool(question.answers) is kept))
    scores = score(some, [Answered((), 0.0) for _ in some.questions])
    names = SquadSet("dev", "", np.zeros((1, 4), np.int64), 1, questions=some, windows=None).measures  # type: ignore[arg-type]
    assert lacking not in scores and lacking not in names and {*names} <= {*scores}
