"""Answers from logits as by a plain loop over windows and pairs; exact match and F1 as in torchmetrics."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import questions as sample
from torchmetrics.functional.text import squad as torchmetrics_squad
from vocabularies import vocabulary_of

from distill.data.span_windows import SpanConfig, SpanWindows, span_windows
from distill.data.tables.squad import Answer, Question, Questions
from distill.evaluation.questions import (
    AnswerConfig,
    Answered,
    Candidate,
    SquadSet,
    find_answers,
    normalised,
    raw_scores,
    score,
    score_texts,
)
from distill.evaluation.sets import NotFinite

# --- answers


def windows_of(made: Questions, family: str = "bert") -> SpanWindows:
    return span_windows(made, vocabulary_of(family), SpanConfig(48, 9, 6), "squad", True)


def logits_of(windows: SpanWindows, ties: bool = False) -> tuple[np.ndarray, np.ndarray]:
    starts, ends = np.random.default_rng(0).normal(size=(2, *windows.sequences.shape))
    return (starts.round(), ends.round()) if ties else (starts.astype(np.float32), ends.astype(np.float32))


def naive(
    questions: Questions, windows: SpanWindows, starts: np.ndarray, ends: np.ndarray, n_best: int, longest: int
) -> list[tuple[list[tuple[str, float]], float]]:
    """Texts and scores of each question, best first, and the least score of no answer."""
    context = windows.context
    assert context is not None
    found = []
    for number, question in enumerate(questions.questions):
        pairs: list[tuple[float, str]] = []
        null = float("inf")
        for window in np.flatnonzero(windows.questions == number):
            null = min(null, float(starts[window, 0]) + float(ends[window, 0]))
            tokens = [p for p, (begin, end) in enumerate(context.offsets[window].tolist()) if end > begin]
            possible = [p for p in tokens if context.fullest[window, p]]
            best_starts = sorted(possible, key=lambda p, w=window: -starts[w, p])[:n_best]
            best_ends = sorted(tokens, key=lambda p, w=window: -ends[w, p])[:n_best]
            for start in best_starts:
                for end in best_ends:
                    if start <= end < start + longest:
                        text = question.context[context.offsets[window, start, 0] : context.offsets[window, end, 1]]
                        pairs.append((float(starts[window, start]) + float(ends[window, end]), text))
        pairs.sort(key=lambda pair: -pair[0])
        texts: dict[str, float] = {}
        for value, text in pairs:
            texts.setdefault(text, value)
        found.append((list(texts.items())[:n_best], null))
    return found


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize(("n_best", "longest"), [(20, 30), (3, 4), (1, 1)])
@pytest.mark.parametrize("family", ["bert", "deberta-v2"])
def test_answers_are_those_of_a_plain_loop(family: str, n_best: int, longest: int, ties: bool) -> None:
    made = sample.made(25, longest=50)
    windows = windows_of(made, family)
    starts, ends = logits_of(windows, ties=ties)
    answered = find_answers(made, windows, starts, ends, AnswerConfig(n_best, longest))
    for found, (texts, null) in zip(answered, naive(made, windows, starts, ends, n_best, longest), strict=True):
        assert [(each.text, each.score) for each in found.candidates] == texts and found.null == null
        assert found.text == (texts[0][0] if texts else "")
        assert found.null_odds == (null - texts[0][1] if texts else np.inf)


def test_what_no_answer_may_be_read_from_is_refused() -> None:
    made = sample.made(5)
    windows = windows_of(made)
    for value in (np.nan, np.inf):
        for position in (0, int(windows.targets["span_start"].max())):
            starts, ends = logits_of(windows)
            starts[:, position] = value
            with pytest.raises(NotFinite):
                find_answers(made, windows, starts, ends, AnswerConfig())
    starts, ends = logits_of(windows)
    expected = find_answers(made, windows, starts, ends, AnswerConfig())
    starts[windows.sequences == windows.pad_id] = -np.inf  # some models say so of padding
    assert find_answers(made, windows, starts, ends, AnswerConfig()) == expected


# --- scores


def by_torchmetrics(questions: Questions, texts: list[str]) -> np.ndarray:
    """[questions, 2] exact match and F1, question by question; without an answer the right text is an empty one.

    It follows the script of v2.0: two texts that are empty once normalised have F1 1, and of v1.1 0.
    """
    found = []
    for question, text in zip(questions.questions, texts, strict=True):
        right = [answer.text for answer in question.answers]
        empty = questions.version == "1.1" and not normalised(text) and not all(map(normalised, right))
        if questions.version == "2.0":
            right = [answer for answer in right if normalised(answer)] or [""]
        target: Any = {"answers": {"text": right, "answer_start": [0] * len(right)}, "id": question.id}
        values = torchmetrics_squad({"prediction_text": text, "id": question.id}, target)
        found.append((float(values["exact_match"]), 0.0 if empty else float(values["f1"])))
    return np.array(found)


@pytest.mark.parametrize("version", ["1.1", "2.0"])
@pytest.mark.parametrize("real", [False, pytest.param(True, marks=sample.REAL)])
def test_predictions_score_as_in_torchmetrics(version: str, real: bool) -> None:
    made = sample.made(1500, version, longest=20, words=[*sample.WORDS, *sample.ODD])
    questions = sample.real(version) if real else made
    texts = sample.predictions(questions)
    found = 100 * raw_scores(questions, texts)
    np.testing.assert_allclose(found, by_torchmetrics(questions, texts), atol=1e-4)  # it rounds to float32
    assert 20 < found[:, 0].mean() < found[:, 1].mean() < 80  # right, wrong and half right ones are among them
    assert ((found[:, 1] > 0) & (found[:, 1] < 100)).sum() > 50
    scores = score_texts(questions, texts)
    assert (scores["exact"], scores["f1"]) == pytest.approx(tuple(found.mean(0)))


@pytest.mark.parametrize(
    ("versions", "text", "answers", "exact", "f1"),
    [
        ("both", "The  Cat.", ["cat"], 100, 100),
        ("both", "a cat and an owl", ["cat and owl"], 100, 100),
        ("both", "theatre", ["atre"], 0, 0),  # an article inside a word stays
        ("both", "cat dog", ["cat", "cat owl", "dog fox bird"], 0, 200 / 3),  # the best of several, not their mean
        ("both", "cat cat", ["cat"], 0, 200 / 3),  # a word counts as often as it is there
        ("both", "U.S.", ["us"], 100, 100),
        ("both", "co-operate", ["cooperate"], 100, 100),
        ("both", "\u2014cat", ["cat"], 0, 0),  # only punctuation of ASCII is removed
        ("both", "ÉCOLE", ["école"], 100, 100),
        ("both", "cat\u00a0\u2003dog", ["cat dog"], 100, 100),
        ("both", "", ["cat"], 0, 0),
        # The scripts treat answers of articles alone differently; only v2.0 knows questions without an answer.
        ("1.1", "a", ["the"], 100, 0),
        ("2.0", "a", ["the"], 100, 100),
        ("2.0", "", [], 100, 100),
        ("2.0", "the", [], 100, 100),  # normalised it says nothing
        ("2.0", "cat", [], 0, 0),
        ("2.0", "", ["the", "cat"], 0, 0),  # "the" is no answer, "cat" is
    ],
)
def test_rules_of_the_versions(versions: str, text: str, answers: list[str], exact: float, f1: float) -> None:
    question = Question("1", "context", "question", tuple(Answer(each, None) for each in answers))
    for version in ("1.1", "2.0") if versions == "both" else (versions,):
        scores = score_texts(Questions("x", version, (question,)), [text])
        assert (scores["exact"], scores["f1"]) == (exact, pytest.approx(f1))
        assert "no_answer_exact" not in scores or scores["no_answer_exact"] == exact


def test_the_tuned_score_is_the_official_one() -> None:
    """By the loop that the official script describes, over different odds: the best score.

    It takes a text such as "the" for an answer, which its scores take for none; there is no such text here.
    """
    words = sorted({*sample.WORDS, *sample.ODD} - {"a", "an", "the", "!"})
    made = sample.made(1000, words=words)
    has = np.array([bool(question.answers) for question in made.questions])
    odds = np.random.default_rng(0).normal(size=1000) - has
    texts = [text if normalised(text) else "cat" for text in sample.predictions(made)]
    said = [Answered((Candidate(text, 0.0, (0, 9)),), odd) for text, odd in zip(texts, odds.tolist(), strict=True)]
    raw, scores = raw_scores(made, texts), score(made, said)
    usual = score_texts(made, [text if odd <= 0 else "" for text, odd in zip(texts, odds, strict=True)])
    assert scores == scores | usual
    for column, name in ((0, "best_exact"), (1, "best_f1")):
        current = best = float((~has).sum())
        for number in np.argsort(odds):
            current += raw[number, column] if has[number] else (-1.0 if texts[number] else 0.0)
            best = max(best, current)
        assert scores[name] == pytest.approx(100 * best / 1000, abs=1e-9)


@pytest.mark.parametrize(("kept", "lacking"), [(True, "no_answer_exact"), (False, "has_answer_f1")])
def test_a_set_has_the_measures_of_its_kinds_of_questions(kept: bool, lacking: str) -> None:
    """A set of v2.0 may be one in which every question has an answer, or none has."""
    made = sample.made(80, "2.0", longest=20, words=sample.WORDS)
    some = replace(made, questions=tuple(question for question in made.questions if bool(question.answers) is kept))
    scores = score(some, [Answered((), 0.0) for _ in some.questions])
    names = SquadSet("dev", "", np.zeros((1, 4), np.int64), 1, questions=some, windows=None).measures  # type: ignore[arg-type]
    assert lacking not in scores and lacking not in names and {*names} <= {*scores}
