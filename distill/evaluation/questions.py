"""Answers to questions: the best stretches of text by the logits of windows, and their exact match and F1.

Answers are chosen as in the published code of BERT (Devlin et al. 2019), which ALBERT's follows, and scored as the
official scripts of SQuAD v1.1 and v2.0 do (Rajpurkar et al. 2016, 2018), in percent of the questions of a set.
torchmetrics' SQuAD rounds to float32, knows no threshold of v2.0 and gives two empty texts an F1 of 1 in v1.1 too.
Shapes: W windows, S positions of a sequence, K best starts or ends of a window.
"""

import re
import string
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import numpy as np

from distill.data.span_windows import NO_ANSWER, SpanWindows
from distill.data.tables.squad import Question, Questions
from distill.evaluation.sets import EvaluationSet, NotFinite

AT_ONCE = 512  # windows whose pairs of positions exist at once
ARTICLES = re.compile(r"\b(a|an|the)\b")
PUNCTUATION = str.maketrans("", "", string.punctuation)  # that of ASCII alone, as officially


class AnswerConfig(NamedTuple):
    """Which stretches of text may be answers."""

    n_best: int = 20  # starts and ends of a window that are paired; also how many answers of a question are kept
    max_tokens: int = 30  # of an answer


class Candidate(NamedTuple):
    """A possible answer."""

    text: str
    score: float  # logit of its start plus that of its end
    place: tuple[int, int]  # its characters [begin, end) of the context


@dataclass(frozen=True)
class Answered:
    """The answers of a model to one question."""

    candidates: tuple[Candidate, ...]  # different texts, the best first
    null: float  # logits of [CLS] as start plus as end, the least of all windows: "no answer" in each of them

    @property
    def text(self) -> str:
        """The best answer; nothing where no stretch of text may be one."""
        return self.candidates[0].text if self.candidates else ""

    @property
    def null_odds(self) -> float:
        """By how much "no answer" beats the best answer; a question is left unanswered above a threshold."""
        return self.null - self.candidates[0].score if self.candidates else np.inf


@dataclass(frozen=True, kw_only=True)
class SquadSet(EvaluationSet):
    """An evaluation set of questions: its `sequences` are windows, and the rest is what their scores need."""

    questions: Questions
    windows: SpanWindows

    @property
    def output_shape(self) -> tuple[int, ...]:
        """Of what a model gives for one sequence."""
        return self.sequences.shape[1], 2

    @property
    def measures(self) -> tuple[str, ...]:
        """Those of its scores that are in reports; the first decides which of two models is better."""
        if self.questions.version == "1.1":
            return ("f1", "exact")
        answered = {bool(question.answers) for question in self.questions.questions}
        parts = (*["has_answer_f1"] * (True in answered), *["no_answer_exact"] * (False in answered))
        return ("f1", "exact", "best_f1", "best_exact", *parts)

    def answered(self, outputs: np.ndarray) -> tuple[dict[str, float], dict[str, np.ndarray]]:
        """Its scores by name, and exact match and F1 of each question from 0 to 1, for the logits [W, S, 2].

        Raises:
            NotFinite: a logit of a first or last token that counts is not finite.
        """
        answered = find_answers(self.questions, self.windows, outputs[..., 0], outputs[..., 1], AnswerConfig())
        texts = texts_of(self.questions, answered)
        raw = raw_scores(self.questions, texts)
        return score(self.questions, answered), {"exact": raw[:, 0], "f1": raw[:, 1]}


# --- answers -------------------------------------------------------------------------------------------------------


class _Pairs(NamedTuple):
    """All pairs of a window that may be answers, in no order."""

    question: int
    begins: np.ndarray  # characters
    ends: np.ndarray
    scores: np.ndarray  # float64
    null: float


def find_answers(
    questions: Questions, windows: SpanWindows, starts: np.ndarray, ends: np.ndarray, settings: AnswerConfig
) -> list[Answered]:
    """The answers of every question, over all of its windows, in the order of the questions.

    A start is one of the `n_best` of its window; it counts in the window alone in which it has most context. An end is
    one of the `n_best` of the same window, at or after it, in a stretch of at most `max_tokens`.

    Args:
        starts, ends: [W, S] logits of an answer's first and last token.

    Raises:
        NotFinite: a logit that counts is not finite.
    """
    by_question = groupby(_pairs(windows, starts, ends, settings), key=lambda pairs: pairs.question)
    return [
        _answered(list(pairs), question.context, settings.n_best)
        for question, (_, pairs) in zip(questions.questions, by_question, strict=True)
    ]


def _pairs(windows: SpanWindows, starts: np.ndarray, ends: np.ndarray, settings: AnswerConfig) -> Iterator[_Pairs]:
    """The candidates of each window, in order."""
    context = windows.context
    assert context is not None
    for first in range(0, len(windows), AT_ONCE):
        some = slice(first, first + AT_ONCE)
        offsets = context.offsets[some]
        solid = offsets[:, :, 1] > offsets[:, :, 0]  # tokens of the context that are not blanks alone
        start, end = starts[some].astype(np.float64), ends[some].astype(np.float64)
        null = start[:, NO_ANSWER] + end[:, NO_ANSWER]
        if not (np.isfinite(start[solid]).all() and np.isfinite(end[solid]).all() and np.isfinite(null).all()):
            raise NotFinite("the model's logits are not finite: no answer can be read from them")
        begin_at, begin_score = _best(start, solid & context.fullest[some], settings.n_best)
        end_at, end_score = _best(end, solid, settings.n_best)
        length = end_at[:, None, :] - begin_at[:, :, None] + 1  # [w, K, K]
        score = begin_score[:, :, None] + end_score[:, None, :]
        possible = (length >= 1) & (length <= settings.max_tokens) & np.isfinite(score)
        for window in range(len(null)):
            i, j = np.nonzero(possible[window])
            yield _Pairs(
                int(windows.questions[first + window]),
                offsets[window, begin_at[window, i], 0],
                offsets[window, end_at[window, j], 1],
                score[window, i, j],
                float(null[window]),
            )


def _best(logits: np.ndarray, usable: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """[w, S] -> the positions [w, K] of the largest usable logits, the first of equal ones first, and those logits."""
    masked = np.where(usable, logits, -np.inf)
    best = np.argsort(-masked, axis=1, kind="stable")[:, :count]
    return best, np.take_along_axis(masked, best, axis=1)


def _answered(windows: list[_Pairs], context: str, n_best: int) -> Answered:
    """The best of the windows of one question; equal scores in the order of windows and their starts."""
    begins, ends, scores = (
        np.concatenate([getattr(pairs, name) for pairs in windows]) for name in ("begins", "ends", "scores")
    )
    candidates: dict[str, Candidate] = {}
    for index in np.argsort(-scores, kind="stable"):
        if len(candidates) == n_best:
            break
        begin, end = int(begins[index]), int(ends[index])
        text = context[begin:end]
        candidates.setdefault(text, Candidate(text, float(scores[index]), (begin, end)))
    return Answered(tuple(candidates.values()), min(pairs.null for pairs in windows))


# --- scores --------------------------------------------------------------------------------------------------------


def score(questions: Questions, answered: Sequence[Answered]) -> dict[str, float]:
    """The scores of a model's answers to each of the questions, in their order, by name.

    Of v1.1 the best answer counts. Of v2.0 a question whose `null_odds` are above 0 stays unanswered; `best_exact` and
    `best_f1` have the threshold that is best on this very set, as published scores have.
    """
    scores, texts = score_texts(questions, texts_of(questions, answered)), [answer.text for answer in answered]
    if questions.version == "1.1":
        return scores
    odds = np.array([answer.null_odds for answer in answered])
    answered_scores, unanswered_scores = raw_scores(questions, texts), raw_scores(questions, [""] * len(texts))
    best = [tune(answered_scores[:, column], unanswered_scores[:, column], odds) for column in (0, 1)]
    return {**scores, "best_exact": best[0], "best_f1": best[1]}


def texts_of(questions: Questions, answered: Sequence[Answered]) -> list[str]:
    """The text that counts of each answer; of v2.0 none where its `null_odds` are above 0."""
    return [each.text if questions.version == "1.1" or each.null_odds <= 0 else "" for each in answered]


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
