"""Labelled texts, and questions in windows of their contexts, as sequences and batches, for every kind of tokenizer."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import questions as sample
import torch
from tiny import make_batches
from tokenizers.processors import TemplateProcessing
from vocabularies import vocabulary_of

from distill.config.settings import BackendConfig, EvaluateConfig
from distill.data.batch import PADDING
from distill.data.collate.tables import Labelled
from distill.data.span_windows import NO_ANSWER, SpanConfig, SpanWindows, span_windows
from distill.data.tables import LabelledTexts
from distill.data.tables.squad import Answer, Question, Questions
from distill.data.text_pairs import class_sequences
from distill.distributed.single import Single
from distill.evaluation.classes import ClassSet
from distill.evaluation.measures import Scoring
from distill.runtime.errors import SettingError

FAMILIES = ["bert", "roberta", "albert", "xlm-roberta", "deberta-v2", "mpnet"]
WORDS = ["the", "cat", "and", "dog", "of", "bank", "running"]


def made(count: int = 30, pairs: bool = True, values: bool = False, longest: int = 12) -> LabelledTexts:
    random = np.random.default_rng(0)
    texts = [[" ".join(random.choice(WORDS, random.integers(1, longest))) for _ in range(count)] for _ in range(2)]
    labels = random.random(count) * 5 if values else random.integers(0, 3, count)
    return LabelledTexts("made", texts[0], texts[1] if pairs else None, labels, () if values else ("a", "b", "c"))


# --- labelled texts


@pytest.mark.parametrize("pairs", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("room", [120, 28, 27])
def test_rows_are_what_the_tokenizer_itself_makes(family: str, pairs: bool, room: int) -> None:
    tokenizer, texts = vocabulary_of(family), made(pairs=pairs)
    most = room + tokenizer.num_special_tokens_to_add(pairs)
    rows = class_sequences(texts, tokenizer, most, "x")
    for number, (one, other) in enumerate(zip(texts.first, texts.second or [None] * len(texts), strict=True)):
        whole = tokenizer(one, other, truncation="longest_first", max_length=most)
        ids, parts = whole.input_ids, whole.sequence_ids(0)
        assert rows.sequences[number].tolist() == ids + [tokenizer.pad_token_id] * (most - len(ids))
        first = parts.index(1) if pairs else len(ids)
        assert np.flatnonzero(rows.segments[number]).tolist() == list(range(first, len(ids)))
    asked = [(one,) if texts.second is None else (one, texts.second[n]) for n, one in enumerate(texts.first)]
    assert rows.cut == sum(len(tokenizer(*each).input_ids) > most for each in asked)
    assert (rows.cut > 0) == (room < 30) and np.array_equal(rows.targets["class"], texts.labels)


def test_the_name_of_a_special_token_in_a_text_is_text() -> None:
    tokenizer = vocabulary_of("bert")
    texts = replace(made(1, pairs=False), first=["the [SEP] cat"])
    row = class_sequences(texts, tokenizer, 32, "x").sequences[0].tolist()
    assert row.count(tokenizer.sep_token_id) == 1


@pytest.mark.parametrize(
    ("family", "lacking", "length", "line"),
    [
        ("bert", None, 4, r"^x=4: no room for text"),
        ("bert", "pad_token", 32, r"^teacher\.path=.*\[PAD\]"),
        ("gpt2", "eos_token", 32, r"^teacher\.path=.*\[PAD\]"),
    ],
)
def test_what_makes_no_rows_is_refused(family: str, lacking: str | None, length: int, line: str) -> None:
    tokenizer = vocabulary_of(family)
    if lacking is not None:
        setattr(tokenizer, lacking, None)
    with pytest.raises(SettingError, match=line):
        class_sequences(made(), tokenizer, length, "x")


@pytest.mark.parametrize("begins", [False, True])
def test_a_decoder_without_padding_fills_up_with_its_end_of_text(begins: bool) -> None:
    """Also one whose texts begin with it, as of GPT-2 with `add_bos_token=True`: they are scored to their end."""
    tokenizer, texts = vocabulary_of("gpt2"), made(pairs=False)
    end, number = tokenizer.eos_token, tokenizer.eos_token_id
    if begins:
        around = TemplateProcessing(single=f"{end} $A", special_tokens=[(end, number)])
        tokenizer.backend_tokenizer.post_processor = around
    rows = class_sequences(texts, tokenizer, 128, "x")
    assert tokenizer.pad_token_id is None and rows.pad_id == number and rows.cut == 0
    expected = [tokenizer(text).input_ids for text in texts.first]
    assert rows.sequences.tolist() == [[*ids, *[number] * (128 - len(ids))] for ids in expected]
    given: Any = {"labels": rows.targets["class"], "classes": ("a", "b", "c"), "measures": ("accuracy",)}
    data = ClassSet("made", "", rows.sequences, 30, collator=Labelled(rows), **given)
    scoring = Scoring(Labelled(rows), tokenizer, EvaluateConfig(), Single(BackendConfig(device="cpu")), [data])
    longest = max(map(len, expected))
    assert scoring.batch(data, np.arange(30)).ids.numpy().tolist() == rows.sequences[:, :longest].tolist()


@pytest.mark.parametrize("values", [True, False])
def test_rows_of_texts_without_labels_follow_those_with(values: bool) -> None:
    tokenizer, one, other = vocabulary_of("bert"), made(8, values=values), made(5, longest=20)
    bare = [LabelledTexts("bare", other.first[:n], (other.second or [])[:n], np.empty(0), ()) for n in (5, 4)]
    labelled, further, fewer = (class_sequences(each, tokenizer, 48, "x") for each in (one, *bare))
    joined = labelled.with_unlabelled(further)
    assert len(joined) == 13 and joined.cut == labelled.cut + further.cut
    for name in ("sequences", "segments"):
        both = np.concatenate([getattr(labelled, name), getattr(further, name)])
        assert np.array_equal(getattr(joined, name), both)
    numbers = np.array([9, 3, 12, 0])
    batch = Labelled(joined).collate(joined.sequences[numbers].astype(np.int64), numbers.astype(np.uint64), numbers)
    positions, targets = batch.labels["class"]
    assert positions.tolist() == [1, 3] and np.allclose(targets, one.labels[[3, 0]]) and len(batch.ids) == 4
    again = labelled.with_unlabelled(fewer)
    assert len({labelled.digest, further.digest, joined.digest, again.digest}) == 4


# --- questions

SMALL = SpanConfig(sequence_length=48, stride=7, max_query=6)


def rows_of(
    questions: Questions, family: str = "bert", settings: SpanConfig = SMALL, scoring: bool = True
) -> SpanWindows:
    return span_windows(questions, vocabulary_of(family), settings, "squad", scoring)


@pytest.mark.parametrize("family", [*FAMILIES, "modernbert", "camembert"])
def test_labels_name_the_answer_and_nothing_else(family: str) -> None:
    """Answers of whole words come back letter by letter, without the blanks that some tokenizers count to a token."""
    made = sample.made(60, longest=30, words=[*sample.WORDS, *sample.ODD])
    windows = rows_of(made, family, SpanConfig(160, 25, 6))
    assert windows.unreached == 0 and windows.context is not None
    found: list[set[str]] = [set() for _ in made.questions]
    for number, start, end, offsets in zip(
        windows.questions, *windows.targets.values(), windows.context.offsets, strict=True
    ):
        if start != NO_ANSWER:
            found[number].add(made.questions[number].context[offsets[start, 0] : offsets[end, 1]])
    assert found == [{answer.text for answer in question.answers[:1]} for question in made.questions]


@pytest.mark.parametrize("family", [*FAMILIES, "modernbert", "camembert"])
def test_rows_are_what_the_tokenizer_itself_makes_of_a_pair(family: str) -> None:
    tokenizer, made = vocabulary_of(family), sample.made(20, longest=8)
    windows = rows_of(made, family, SpanConfig(128, 64, 64))
    for row, segments, question in zip(windows.sequences, windows.segments, made.questions, strict=True):
        encoded = tokenizer(question.question, question.context)
        ids, first = encoded.input_ids, encoded.sequence_ids(0).index(1)
        assert row.tolist() == ids + [tokenizer.pad_token_id] * (128 - len(ids))
        assert segments.tolist() == [0] * first + [1] * (len(ids) - first) + [0] * (128 - len(ids))


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
    windows = rows_of(sample.made(30, longest=80))
    context = windows.context
    assert context is not None and len(windows) > 200
    for number in range(30):
        own = np.flatnonzero(windows.questions == number)
        seen: dict[int, list[tuple[float, int]]] = {}  # by begin of a token: score and window
        for window in own:
            inside = np.flatnonzero(context.offsets[window, :, 0] >= 0)
            for position in inside:
                score = min(position - inside[0], inside[-1] - position) + 0.01 * len(inside)
                seen.setdefault(int(context.offsets[window, position, 0]), []).append((score, window))
        for begin, scores in seen.items():
            most = max(score for score, _ in scores)
            best = next(window for score, window in scores if score == most)
            for _, window in scores:
                position = np.flatnonzero(context.offsets[window, :, 0] == begin)[0]
                assert context.fullest[window, position] == (window == best)
        assert context.fullest[own].sum() == len(seen)


@pytest.mark.parametrize("length", [18, 20])
def test_a_window_that_holds_only_some_of_the_answer_has_none(length: int) -> None:
    """Of 18 ids one ends just before the answer's last token."""
    context = " ".join(f"{letter}{letter}" for letter in "abcdefghijklmnopqrstuvw")
    begin = context.index("hh")
    question = Question("1", context, "a", (Answer("hh ii jj", (begin, begin + 8)),))
    long = Question("2", context, "a", (Answer(context, (0, len(context))),))
    windows = rows_of(Questions("x", "2.0", (question, long)), settings=SpanConfig(length, 5, 4))
    assert windows.context is not None and windows.unreached == 1
    holding, own = 0, np.flatnonzero(windows.questions == 0)
    for window in own:
        inside = windows.context.offsets[window]
        inside = inside[inside[:, 0] >= 0]
        holds = inside[0, 0] <= begin and inside[-1, 1] >= begin + 8
        holding += holds
        assert [labels[window] != NO_ANSWER for labels in windows.targets.values()] == [holds, holds]
    assert 0 < holding < len(own)


@pytest.mark.parametrize("unlabelled", [0, 4])
def test_batches_of_windows(unlabelled: int) -> None:
    """Windows of questions without answers follow those with, and have no targets."""
    settings = SpanConfig(100, 30, 20)
    windows = known = rows_of(sample.made(40, longest=12), settings=settings, scoring=False)
    if unlabelled:
        further = rows_of(sample.made(unlabelled, seed=1), settings=settings, scoring=False)
        windows = known.with_unlabelled(further)
        assert len({known.digest, further.digest, windows.digest}) == 3
        assert sorted({*windows.questions.tolist()}) == list(range(40 + unlabelled))
    batches, met = make_batches(windows.sequences, Labelled(windows), 4, 1, seed=0), []
    for batch in (batch for step in range(batches.steps_per_epoch) for batch in batches.window(step)):
        width, rows = batch.ids.shape[1], torch.from_numpy(windows.sequences[batch.row_ids].astype(np.int64))
        assert torch.equal(batch.ids, rows[:, :width]) and (rows[:, width:] == windows.pad_id).all()
        assert width % 32 == 0 or width == 100
        assert batch.documents is not None and torch.equal(batch.documents != PADDING, batch.ids != windows.pad_id)
        has = np.flatnonzero(batch.row_ids < len(known))
        for name, positions in windows.targets.items():
            assert batch.labels[name].positions.tolist() == has.tolist()
            assert batch.labels[name].targets.tolist() == positions[batch.row_ids[has]].tolist()
        met += batch.row_ids.tolist()
    assert sorted(met) == list(range(len(windows)))
