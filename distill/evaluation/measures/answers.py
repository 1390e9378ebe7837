"""From the logits of windows to answers: the best stretches of text of every question, and how little it has one.

The rule is that of the published code of BERT (Devlin et al. 2019), which ALBERT's follows. Shapes: W windows, S
positions of a sequence, K best starts or ends of a window.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import numpy as np

from distill.data.span_windows import NO_ANSWER, SpanWindows
from distill.data.tables.squad import Questions
from distill.evaluation.sets import NotFinite

AT_ONCE = 512  # windows whose pairs of positions exist at once


@dataclass
class AnswerConfig:
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
        ValueError: the shapes do not fit.
    """
    if starts.shape != windows.sequences.shape or ends.shape != windows.sequences.shape:
        raise ValueError(
            f"logits of shape {starts.shape} and {ends.shape} for windows of shape {windows.sequences.shape}"
        )
    answers: list[Answered] = []
    for number, pairs in groupby(_pairs(windows, starts, ends, settings), key=lambda window: window.question):
        assert number == len(answers)
        answers.append(_answered(list(pairs), questions.questions[number].context, settings.n_best))
    assert len(answers) == len(questions)
    return answers


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
