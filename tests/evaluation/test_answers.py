"""Answers from logits: the same as a plain loop over all windows and pairs, and right where the logits are."""

import os

import numpy as np
import pytest
import questions as sample
from job import ROOT
from transformers import AutoTokenizer
from vocabularies import vocabulary_of

from distill.data.span_windows import SpanConfig, SpanWindows, span_windows
from distill.data.tables.squad import Questions
from distill.evaluation.questions import AnswerConfig, find_answers, score
from distill.evaluation.sets import NotFinite


def logits_of(windows: SpanWindows, seed: int = 0, ties: bool = False) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    starts, ends = random.normal(size=(2, *windows.sequences.shape))
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
def test_the_same_as_a_plain_loop(family: str, n_best: int, longest: int, ties: bool) -> None:
    made = sample.made(25, longest=50)
    windows = span_windows(made, vocabulary_of(family), SpanConfig(48, 9, 6), "squad", True)
    starts, ends = logits_of(windows, ties=ties)
    answered = find_answers(made, windows, starts, ends, AnswerConfig(n_best, longest))
    for found, (texts, null) in zip(answered, naive(made, windows, starts, ends, n_best, longest), strict=True):
        assert [(each.text, each.score) for each in found.candidates] == texts
        assert found.null == null
        assert found.text == (texts[0][0] if texts else "")
        assert found.null_odds == (null - texts[0][1] if texts else np.inf)


def certain(windows: SpanWindows) -> tuple[np.ndarray, np.ndarray]:
    """Logits of a model that knows every label."""
    starts, ends = np.zeros((2, *windows.sequences.shape), np.float32)
    numbers = np.arange(len(windows))
    starts[numbers, windows.starts] = ends[numbers, windows.ends] = 9
    return starts, ends


def test_what_no_answer_may_be_read_from_is_refused() -> None:
    made = sample.made(5)
    windows = span_windows(made, vocabulary_of("bert"), SpanConfig(48, 9, 6), "squad", True)
    for value in (np.nan, np.inf):
        for position in (0, int(windows.starts.max())):
            starts, ends = logits_of(windows)
            starts[:, position] = value
            with pytest.raises(NotFinite):
                find_answers(made, windows, starts, ends, AnswerConfig())
    starts, ends = logits_of(windows)
    expected = find_answers(made, windows, starts, ends, AnswerConfig())
    starts[windows.sequences == windows.pad_id] = -np.inf  # some models say so of padding
    assert find_answers(made, windows, starts, ends, AnswerConfig()) == expected


@sample.REAL
@pytest.mark.parametrize("version", ["1.1", "2.0"])
def test_real_questions_whose_labels_are_known(version: str) -> None:
    """What is lost are answers of more than 30 tokens, and those that end inside a word."""
    assert os.environ["DISTILL_DATA"]
    questions = sample.real(version)
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "distill/teacher/bundled_small")
    windows = span_windows(questions, tokenizer, SpanConfig(), "squad", True)
    scores = score(questions, find_answers(questions, windows, *certain(windows), AnswerConfig()))
    assert 98.5 < scores["exact"] <= scores["f1"] < 100
    long = score(questions, find_answers(questions, windows, *certain(windows), AnswerConfig(max_tokens=200)))
    assert long["exact"] > 99.7
