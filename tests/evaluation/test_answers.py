"""Answers from logits: the same as a plain loop over all windows and pairs, and right where the logits are."""

import math
import os

import numpy as np
import pytest
import questions as sample
import torch
from job import ROOT
from transformers import AutoTokenizer
from vocabularies import vocabulary_of

from distill.data.span_windows import SpanConfig, SpanWindows, span_windows
from distill.data.tables.squad import Questions
from distill.evaluation.measures.answers import AnswerConfig, find_answers
from distill.evaluation.measures.squad import score, squad_set
from distill.evaluation.measures.tables import TableScores


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


def test_candidates_say_where_they_stand() -> None:
    made = sample.made(10)
    windows = span_windows(made, vocabulary_of("albert"), SpanConfig(48, 9, 6), "squad", True)
    answered = find_answers(made, windows, *logits_of(windows), AnswerConfig())
    for question, found in zip(made.questions, answered, strict=True):
        assert len(found.candidates) == len({each.text for each in found.candidates}) <= 20
        for each in found.candidates:
            assert question.context[slice(*each.place)] == each.text == each.text.strip() != ""


def certain(windows: SpanWindows) -> tuple[np.ndarray, np.ndarray]:
    """Logits of a model that knows every label."""
    starts, ends = np.zeros((2, *windows.sequences.shape), np.float32)
    numbers = np.arange(len(windows))
    starts[numbers, windows.starts] = ends[numbers, windows.ends] = 9
    return starts, ends


@pytest.mark.parametrize("version", ["1.1", "2.0"])
@pytest.mark.parametrize("family", ["bert", "roberta", "xlm-roberta", "albert", "deberta-v2"])
def test_a_model_that_knows_the_labels_has_full_marks(family: str, version: str) -> None:
    words = {*sample.WORDS, *sample.ODD} - {"a", "an", "the", "!"}  # of which v1.1 gives no F1 even if they are right
    made = sample.made(80, version, words=sorted(words))
    windows = span_windows(made, vocabulary_of(family), SpanConfig(120, 40, 6), "squad", True)
    assert windows.unreached == 0
    scores = score(made, find_answers(made, windows, *certain(windows), AnswerConfig(max_tokens=100)))
    assert (scores["exact"], scores["f1"]) == (100, 100)


def test_what_no_answer_may_be_read_from_is_refused() -> None:
    made = sample.made(5)
    windows = span_windows(made, vocabulary_of("bert"), SpanConfig(48, 9, 6), "squad", True)
    for value in (np.nan, np.inf):
        for position in (0, int(windows.starts.max())):
            starts, ends = logits_of(windows)
            starts[:, position] = value
            with pytest.raises(ValueError, match="not finite"):
                find_answers(made, windows, starts, ends, AnswerConfig())
    starts, ends = logits_of(windows)
    expected = find_answers(made, windows, starts, ends, AnswerConfig())
    starts[windows.sequences == windows.pad_id] = -np.inf  # some models say so of padding
    assert find_answers(made, windows, starts, ends, AnswerConfig()) == expected
    with pytest.raises(ValueError, match="logits of shape"):
        find_answers(made, windows, starts[:-1], ends, AnswerConfig())


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


@pytest.mark.parametrize("version", ["1.1", "2.0"])
def test_logits_that_are_not_finite_have_no_score(version: str) -> None:
    made = sample.made(5, version)
    data = squad_set("dev", made, span_windows(made, vocabulary_of("bert"), SpanConfig(48, 9, 6), "squad", True))
    scores = TableScores(data)
    logits = torch.zeros(scores.outputs.shape)
    logits[0, 0, 0] = math.nan
    scores.update(logits, torch.arange(len(logits)))
    found = scores.compute()
    assert tuple(found) == data.measures and all(math.isnan(value) for value in found.values())
