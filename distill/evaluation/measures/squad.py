"""Exact match and F1 of SQuAD v1.1 and v2.0, as the official scripts of Rajpurkar et al. (2016, 2018) define them.

All scores are percentages of the questions of a set.
"""

import re
import string
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from distill.data.span_windows import SpanWindows
from distill.data.tables.squad import Question, Questions
from distill.evaluation.measures.answers import AnswerConfig, Answered, find_answers
from distill.evaluation.sets import EvaluationSet

ARTICLES = re.compile(r"\b(a|an|the)\b")
PUNCTUATION = str.maketrans("", "", string.punctuation)  # that of ASCII alone, as officially


@dataclass(frozen=True, kw_only=True)
class SquadSet(EvaluationSet):
    """An evaluation set of questions: its `sequences` are windows, and the rest is what their scores need."""

    questions: Questions
    windows: SpanWindows

    @property
    def measures(self) -> tuple[str, ...]:
        """Those of its scores that are in reports; the first decides which of two models is better."""
        if self.questions.version == "1.1":
            return ("f1", "exact")
        answered = {bool(question.answers) for question in self.questions.questions}
        parts = (*["has_answer_f1"] * (True in answered), *["no_answer_exact"] * (False in answered))
        return ("f1", "exact", "best_f1", "best_exact", *parts)

    def scores(self, outputs: np.ndarray) -> dict[str, float]:
        """Its scores by name, for the logits of first and last tokens [W, S, 2].

        Raises:
            NotFinite: a logit that counts is not finite.
        """
        answered = find_answers(self.questions, self.windows, outputs[..., 0], outputs[..., 1], AnswerConfig())
        return score(self.questions, answered)


def squad_set(name: str, questions: Questions, windows: SpanWindows) -> SquadSet:
    """The evaluation set of these questions; `windows` were made of them for scoring."""
    assert windows.context is not None
    contexts = len({question.context for question in questions.questions})
    return SquadSet(name, questions.describe(), windows.sequences, contexts, questions=questions, windows=windows)


def score(questions: Questions, answered: Sequence[Answered]) -> dict[str, float]:
    """The scores of a model's answers to each of the questions, in their order, by name.

    Of v1.1 the best answer counts. Of v2.0 a question whose `null_odds` are above 0 stays unanswered; `best_exact` and
    `best_f1` have the threshold that is best on this very set, as published scores have.
    """
    texts = [answer.text for answer in answered]
    if questions.version == "1.1":
        return score_texts(questions, texts)
    odds = np.array([answer.null_odds for answer in answered])
    scores = score_texts(questions, [text if o <= 0 else "" for text, o in zip(texts, odds, strict=True)])
    answered_scores, unanswered_scores = raw_scores(questions, texts), raw_scores(questions, [""] * len(texts))
    best = [tune(answered_scores[:, column], unanswered_scores[:, column], odds) for column in (0, 1)]
    return {**scores, "best_exact": best[0], "best_f1": best[1]}


def score_texts(questions: Questions, texts: Sequence[str]) -> dict[str, float]:
    """`exact` and `f1` of one text for each question, in their order; of v2.0 an empty one says that it has no answer.

    Of v2.0 also `has_answer_f1`, of the questions that have an answer, and `no_answer_exact`, the share of the others
    that is left unanswered, as far as there are such questions.
    """
    percent = 100.0 * raw_scores(questions, texts)
    exact, f1 = percent.mean(0).tolist()
    scores: dict[str, float] = {"exact": exact, "f1": f1}
    if questions.version == "1.1":
        return scores
    has = np.array([bool(question.answers) for question in questions.questions])
    if has.any():
        scores["has_answer_f1"] = percent[has].mean(0).tolist()[1]
    if not has.all():
        scores["no_answer_exact"] = float(percent[~has, 0].mean())
    return scores


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


def tune(answered_scores: np.ndarray, unanswered_scores: np.ndarray, odds: np.ndarray) -> float:
    """The best mean score in percent over all thresholds; questions whose `null_odds` are above it stay unanswered.

    Every score here is one that some threshold gives. The official script walks through questions of equal odds too,
    and may report a score that no threshold has; where all odds differ, it gives the same.

    Args:
        answered_scores, unanswered_scores: [N] scores from 0 to 1 of each question with its answer, and without.
        odds: [N] `null_odds`.
    """
    order = np.argsort(odds, kind="stable")
    odds, gains = odds[order], (answered_scores - unanswered_scores)[order]
    total = unanswered_scores.sum() + np.append(0.0, np.cumsum(gains))  # with the first 0, 1, ... N questions answered
    possible = np.append(True, np.append(odds[1:] != odds[:-1], np.isfinite(odds[-1])))
    return 100.0 * float(total[possible].max()) / len(odds)
