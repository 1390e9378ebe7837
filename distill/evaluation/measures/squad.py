"""Exact match and F1 of SQuAD v1.1 and v2.0, as the official scripts of Rajpurkar et al. (2016, 2018) define them.

All scores are percentages of the questions of a set.
"""

import math
import re
import string
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from distill.data.span_windows import SpanWindows
from distill.data.tables.squad import Question, Questions
from distill.evaluation.measures.answers import AnswerConfig, Answered, find_answers
from distill.evaluation.sets import EvaluationSet

ARTICLES = re.compile(r"\b(a|an|the)\b")
PUNCTUATION = str.maketrans("", "", string.punctuation)  # that of ASCII alone, as officially


@dataclass(frozen=True)
class Tuned:
    """The best score over all null thresholds, chosen on the very set that is scored, as published scores are."""

    score: float
    threshold: float  # questions whose `null_odds` are above it stay unanswered


@dataclass(frozen=True)
class SquadScores:
    """The scores of a set. Those of the second group are of v2.0 alone."""

    exact: float
    f1: float

    has_answer_exact: float | None = None  # over the questions that have an answer
    has_answer_f1: float | None = None
    no_answer_exact: float | None = None  # over those that have none: the share that is left unanswered
    best_exact: Tuned | None = None
    best_f1: Tuned | None = None

    def by_name(self) -> dict[str, float]:
        """All that there are; `best_f1` is tuned, `best_f1_threshold` its threshold."""
        scores: dict[str, float] = {}
        for name, value in vars(self).items():
            if isinstance(value, Tuned):
                scores |= {name: value.score, f"{name}_threshold": value.threshold}
            elif value is not None:
                scores[name] = value
        return scores


@dataclass(frozen=True, kw_only=True)
class SquadSet(EvaluationSet):
    """An evaluation set of questions: its `sequences` are windows, and the rest is what their scores need."""

    questions: Questions
    windows: SpanWindows
    settings: AnswerConfig = field(default_factory=AnswerConfig)

    @property
    def measures(self) -> tuple[str, ...]:
        """Those of its scores that are in reports; the first decides which of two models is better."""
        if self.questions.version == "1.1":
            return ("f1", "exact")
        answered = {bool(question.answers) for question in self.questions.questions}
        parts = (*["has_answer_f1"] * (True in answered), *["no_answer_exact"] * (False in answered))
        return ("f1", "exact", "best_f1", "best_exact", *parts)

    def scores(self, outputs: np.ndarray) -> dict[str, float]:
        """Its scores by name, for the logits of first and last tokens [W, S, 2]."""
        return self.score(outputs[..., 0], outputs[..., 1], self.settings).by_name()

    def answers(self, starts: np.ndarray, ends: np.ndarray, settings: AnswerConfig) -> list[Answered]:
        """The answers of a model with these logits [W, S] to each question."""
        return find_answers(self.questions, self.windows, starts, ends, settings)

    def score(
        self, starts: np.ndarray, ends: np.ndarray, settings: AnswerConfig, null_threshold: float = 0.0
    ) -> SquadScores:
        """The scores of a model with these logits [W, S]; `null_threshold` is that of v2.0's untuned scores.

        Raises:
            ValueError: a logit that counts is not finite.
        """
        return score(self.questions, self.answers(starts, ends, settings), null_threshold)


def squad_set(name: str, questions: Questions, windows: SpanWindows) -> SquadSet:
    """The evaluation set of these questions; `windows` were made of them for scoring."""
    assert windows.context is not None
    contexts = len({question.context for question in questions.questions})
    return SquadSet(name, questions.describe(), windows.sequences, contexts, questions=questions, windows=windows)


def score(questions: Questions, answered: Sequence[Answered], null_threshold: float = 0.0) -> SquadScores:
    """The scores of a model's answers to each of the questions, in their order.

    Of v1.1 the best answer counts. Of v2.0 a question whose `null_odds` are above the threshold stays unanswered, and
    the best thresholds for exact match and for F1 are reported too.
    """
    texts = [answer.text for answer in answered]
    if questions.version == "1.1":
        return score_texts(questions, texts)
    odds = np.array([answer.null_odds for answer in answered])
    plain = score_texts(questions, [text if o <= null_threshold else "" for text, o in zip(texts, odds, strict=True)])
    answered_scores, unanswered_scores = raw_scores(questions, texts), raw_scores(questions, [""] * len(texts))
    best = [tune(answered_scores[:, column], unanswered_scores[:, column], odds) for column in (0, 1)]
    return SquadScores(**{**vars(plain), "best_exact": best[0], "best_f1": best[1]})


def score_texts(questions: Questions, texts: Sequence[str]) -> SquadScores:
    """The scores of one text for each question, in their order; of v2.0 an empty one means that it has no answer."""
    scores = 100.0 * raw_scores(questions, texts)
    exact, f1 = scores.mean(0).tolist()
    if questions.version == "1.1":
        return SquadScores(exact, f1)
    has = np.array([bool(question.answers) for question in questions.questions])
    has_exact, has_f1 = scores[has].mean(0).tolist() if has.any() else (None, None)
    without = float(scores[~has, 0].mean()) if not has.all() else None
    return SquadScores(exact, f1, has_exact, has_f1, without)


def raw_scores(questions: Questions, texts: Sequence[str]) -> np.ndarray:
    """[questions, 2] exact match and F1 of each text from 0 to 1, the largest over the answers that count as right."""
    pairs = zip(questions.questions, texts, strict=True)
    return np.array([_of_question(question, text, questions.version) for question, text in pairs], np.float64)


def _of_question(question: Question, text: str, version: str) -> tuple[float, float]:
    right = [normalised(answer.text) for answer in question.answers]
    if version == "2.0":  # an answer of articles and punctuation alone does not count, and none is an empty one
        right = [answer for answer in right if answer] or [""]
    predicted = normalised(text)
    return float(predicted in right), max(_f1(predicted, answer, version) for answer in right)


def normalised(text: str) -> str:
    """Lower case, without punctuation and articles, words parted by one space."""
    return " ".join(ARTICLES.sub(" ", text.lower().translate(PUNCTUATION)).split())


def _f1(predicted: str, right: str, version: str) -> float:
    """F1 of the words that two normalised texts share; of two empty ones 1 in v2.0 and 0 in v1.1."""
    predicted_words, right_words = predicted.split(), right.split()
    if version == "2.0" and not (predicted_words and right_words):
        return float(predicted_words == right_words)
    if not (shared := (Counter(predicted_words) & Counter(right_words)).total()):
        return 0.0
    precision, recall = shared / len(predicted_words), shared / len(right_words)
    return 2 * precision * recall / (precision + recall)


def tune(answered_scores: np.ndarray, unanswered_scores: np.ndarray, odds: np.ndarray) -> Tuned:
    """The threshold with the best mean score, the lowest of several.

    Every score here is one that `score` gives with its threshold. The official script walks through questions of equal
    odds too, and may report a score that no threshold has; where all odds differ, it gives the same.

    Args:
        answered_scores, unanswered_scores: [N] scores from 0 to 1 of each question with its answer, and without.
        odds: [N] `null_odds`.
    """
    order = np.argsort(odds, kind="stable")
    odds, gains = odds[order], (answered_scores - unanswered_scores)[order]
    total = unanswered_scores.sum() + np.append(0.0, np.cumsum(gains))  # with the first 0, 1, ... N questions answered
    possible = np.append(True, np.append(odds[1:] != odds[:-1], np.isfinite(odds[-1])))
    best = int(np.where(possible, total, -np.inf).argmax())
    # Below all odds nothing is answered; the scores have to be JSON, which has no infinity.
    threshold = odds[best - 1] if best else math.nextafter(odds[0], -math.inf) if np.isfinite(odds[0]) else 0.0
    return Tuned(100.0 * float(total[best]) / len(odds), float(threshold))
