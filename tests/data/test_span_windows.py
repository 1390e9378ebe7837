"""Questions as sequences: windows as published, answers where they stand, for every kind of tokenizer."""

from typing import Any

import numpy as np
import pytest
import questions as sample
import torch
from job import ROOT
from tiny import make_batches
from transformers import AutoTokenizer
from vocabularies import vocabulary_of

from distill.data.batch import PADDING
from distill.data.collate.tables import Labelled
from distill.data.span_windows import NO_ANSWER, SpanConfig, SpanWindows, span_windows
from distill.data.tables.squad import Answer, Question, Questions, Squad
from distill.runtime.errors import SettingError

FAMILIES = ["bert", "roberta", "xlm-roberta", "albert", "deberta-v2", "mpnet", "modernbert", "camembert"]
TWO_BETWEEN = ("roberta", "xlm-roberta", "mpnet", "camembert")  # special tokens between two texts
SMALL = SpanConfig(sequence_length=48, stride=7, max_query=6)


def rows_of(
    questions: Questions, family: str = "bert", settings: SpanConfig = SMALL, scoring: bool = True
) -> SpanWindows:
    return span_windows(questions, vocabulary_of(family), settings, "squad", scoring)


def text_at(questions: Questions, windows: SpanWindows, window: int) -> str:
    """The text of the context between the positions that a window's labels name."""
    assert windows.context is not None
    offsets = windows.context.offsets[window]
    begin, end = offsets[windows.starts[window], 0], offsets[windows.ends[window], 1]
    return questions.questions[windows.questions[window]].context[begin:end]


@pytest.mark.parametrize("family", FAMILIES)
def test_labels_name_the_answer_and_nothing_else(family: str) -> None:
    """Answers of whole words come back letter by letter, without the blanks that some tokenizers count to a token."""
    made = sample.made(60, longest=30, words=[*sample.WORDS, *sample.ODD])
    windows = rows_of(made, family, SpanConfig(160, 25, 6))
    assert windows.unreached == 0
    for number, question in enumerate(made.questions):
        own = np.flatnonzero(windows.questions == number)
        texts = [text_at(made, windows, window) for window in own if windows.starts[window] != NO_ANSWER]
        assert set(texts) <= {answer.text for answer in question.answers[:1]}
        assert bool(texts) == bool(question.answers)


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_are_what_the_tokenizer_itself_makes_of_a_pair(family: str) -> None:
    tokenizer = vocabulary_of(family)
    made = sample.made(20, longest=8)
    windows = rows_of(made, family, SpanConfig(128, 64, 64))
    assert len(windows) == 20
    for row, segments, question in zip(windows.sequences, windows.segments, made.questions, strict=True):
        encoded = tokenizer(question.question, question.context)
        expected, parts = encoded.input_ids, encoded.sequence_ids(0)
        assert row[: len(expected)].tolist() == expected
        assert (row[len(expected) :] == tokenizer.pad_token_id).all()
        first = parts.index(1)
        assert segments.tolist() == [0] * first + [1] * (len(expected) - first) + [0] * (128 - len(expected))


def published_windows(tokens: int, room: int, stride: int) -> list[tuple[int, int]]:
    """The loop of BERT's published code, as its description says: (begin, length) of each window."""
    found, begin = [], 0
    while begin < tokens:
        length = min(room, tokens - begin)
        found.append((begin, length))
        if begin + length == tokens:
            break
        begin += min(length, stride)
    return found or [(0, 0)]  # a context without a token still has its question scored


@pytest.mark.parametrize("family", ["bert", "roberta"])
def test_windows_are_those_of_the_published_loop(family: str) -> None:
    tokenizer = vocabulary_of(family)
    for tokens in range(25):
        asked = Question("1", " ".join("abcdefghijklmnopqrstuvwxyz"[:tokens]), "a b c", ())
        ids = tokenizer(asked.context, add_special_tokens=False).input_ids
        for room in range(1, 12):
            length = room + 3 + tokenizer.num_special_tokens_to_add(pair=True)
            for stride in range(1, 14):
                # With the last argument as large as a window that loop would lay windows side by side.
                expected = published_windows(len(ids), room, stride if stride < room else max(1, room // 2))
                windows = rows_of(Questions("x", "2.0", (asked,)), family, SpanConfig(length, stride, 3))
                found = [row[segments == 1] for row, segments in zip(windows.sequences, windows.segments, strict=True)]
                assert [row[:-1].tolist() for row in found] == [ids[b : b + n] for b, n in expected], (room, stride)


def test_each_token_counts_in_the_window_with_most_context() -> None:
    made = sample.made(30, longest=80)
    windows = rows_of(made, "bert")
    context = windows.context
    assert context is not None and len(windows) > 200
    for number in range(30):
        own = np.flatnonzero(windows.questions == number)
        seen: dict[int, list[tuple[float, int]]] = {}  # by begin of a token: score and window
        for window in own:
            inside = np.flatnonzero(context.offsets[window, :, 0] >= 0)
            for position in inside:
                left, right = position - inside[0], inside[-1] - position
                score = min(left, right) + 0.01 * len(inside)
                seen.setdefault(int(context.offsets[window, position, 0]), []).append((score, window))
        for begin, scores in seen.items():
            most = max(score for score, _ in scores)
            best = next(window for score, window in scores if score == most)
            for _, window in scores:
                position = np.flatnonzero(context.offsets[window, :, 0] == begin)[0]
                assert context.fullest[window, position] == (window == best)
        assert context.fullest[own].sum() == len(seen)


def test_a_window_that_holds_only_some_of_the_answer_has_none() -> None:
    words = [f"{letter}{letter}" for letter in "abcdefghijklmnopqrstuvw"]
    context = " ".join(words)
    begin = context.index("hh")
    question = Question("1", context, "a", (Answer("hh ii jj", (begin, begin + 8)),))
    long = Question("2", context, "a", (Answer(context, (0, len(context))),))
    windows = rows_of(Questions("x", "2.0", (question, long)), settings=SpanConfig(20, 5, 4))
    assert windows.context is not None and windows.unreached == 1
    holding, own = 0, np.flatnonzero(windows.questions == 0)
    for window in own:
        offsets = windows.context.offsets[window]
        inside = offsets[offsets[:, 0] >= 0]
        holds = inside[0, 0] <= begin and inside[-1, 1] >= begin + 8
        holding += holds
        assert (windows.starts[window] != NO_ANSWER) == (windows.ends[window] != NO_ANSWER) == holds
    assert 0 < holding < len(own)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (
            {"sequence_length": 9},
            r"^squad\.sequence_length=9: no room for a context behind 6 tokens .* set it to 10 or more, or",
        ),
        ({"stride": 0}, r"^squad\.stride=0: give a number of tokens, 1"),
        ({"max_query": 0}, r"^squad\.max_query=0: give a number of tokens, 1"),
    ],
)
def test_settings_without_sense_are_refused(changes: dict[str, Any], line: str) -> None:
    with pytest.raises(SettingError, match=line):
        rows_of(sample.made(2), settings=SpanConfig(**{**vars(SMALL), **changes}))


@pytest.mark.parametrize("unlabelled", [0, 4])
def test_batches(unlabelled: int) -> None:
    """Windows of questions without answers follow those with, and have no targets."""
    labelled, settings = sample.made(40, longest=12), SpanConfig(100, 30, 20)
    windows = known = rows_of(labelled, settings=settings, scoring=False)
    if unlabelled:
        further = rows_of(sample.made(unlabelled, seed=1), settings=settings, scoring=False)
        windows = known.with_unlabelled(further)
        assert len({known.digest, further.digest, windows.digest}) == 3
        assert sorted({*windows.questions.tolist()}) == list(range(40 + unlabelled))
    collator = Labelled(windows)
    batches = make_batches(windows.sequences, collator, 4, 1, seed=0)
    met = []
    for batch in (batch for step in range(batches.steps_per_epoch) for batch in batches.window(step)):
        width = batch.ids.shape[1]
        rows = torch.from_numpy(windows.sequences[batch.row_ids].astype(np.int64))
        assert torch.equal(batch.ids, rows[:, :width]) and (rows[:, width:] == collator.pad_id).all()
        assert width % 32 == 0 or width == 100
        assert batch.documents is not None and torch.equal(batch.documents != PADDING, batch.ids != collator.pad_id)
        has = np.flatnonzero(batch.row_ids < len(known))
        for name, positions in (("span_start", windows.starts), ("span_end", windows.ends)):
            assert batch.labels[name].positions.tolist() == has.tolist()
            assert batch.labels[name].targets.tolist() == positions[batch.row_ids[has]].tolist()
        assert np.array_equal(batch.inputs["token_type_ids"].numpy(), windows.segments[batch.row_ids][:, :width])
        met += batch.row_ids.tolist()
    assert sorted(met) == list(range(len(windows)))


@sample.REAL
def test_real_questions() -> None:
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "distill/teacher/bundled_small")
    questions = Squad(split="train", version="2.0").read("squad.train", True)
    windows = span_windows(questions, tokenizer, SpanConfig(), "squad", False)
    assert windows.unreached == 0 and len(np.unique(windows.questions)) == len(questions)
    answerable = np.array([bool(question.answers) for question in questions.questions])
    assert np.array_equal(np.unique(windows.questions[windows.starts != NO_ANSWER]), np.flatnonzero(answerable))
