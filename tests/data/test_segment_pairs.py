"""Sequences of two segments: of one document, consecutive, whole sentences, as long as published."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from job import book
from tiny import CLS, PAD, SEP, parts, text_config

from distill.data.segment_pairs import PairWriter, sentences
from distill.data.sequence_format import SequenceFormat, paired_format
from distill.data.sources.gutenberg import clean
from distill.data.tokens import Tokens, corpus_text, prepare

FORMAT = SequenceFormat(CLS, SEP, None, None, SEP, PAD, 8, pairs=True)
LENGTH = 24
ROOM = LENGTH - 3


def written(documents: list[list[list[int]]], length: int = LENGTH) -> tuple[np.ndarray, PairWriter]:
    """The sequences [N, length] of documents of sentences of ids."""
    file = io.BytesIO()
    writer = PairWriter(file, FORMAT, length, np.dtype(np.uint16))
    for number, document in enumerate(documents):
        writer.add(f"document {number}", document)
    return np.frombuffer(file.getvalue(), np.uint16).reshape(-1, length).astype(int), writer


def numbered(count: int, draw: np.random.Generator, first: int = 10) -> list[list[int]]:
    """A document whose ids count upwards, in sentences of 1 to 9 ids."""
    cuts = np.cumsum(draw.integers(1, 10, count))
    return [list(range(first + int(a), first + int(b))) for a, b in zip(np.append(0, cuts), cuts, strict=False)]


def segments(row: np.ndarray) -> tuple[list[int], list[int]]:
    middle, end = np.flatnonzero(row == SEP)
    assert row[0] == CLS and (row[end + 1 :] == PAD).all()
    return row[1:middle].tolist(), row[middle + 1 : end].tolist()


def test_both_segments_are_consecutive_and_of_one_document() -> None:
    draw = np.random.default_rng(0)
    documents = [numbered(60, draw, 10 + 1000 * number) for number in range(8)]
    rows, writer = written(documents)
    assert len(rows) == writer.sequences > 60
    for row in rows:
        first, second = segments(row)
        assert first and second
        both = first + second
        assert len({number // 1000 for number in both}) == 1, "one document"
        assert first == list(range(first[0], first[-1] + 1)) and second == list(range(second[0], second[-1] + 1))
        assert 0 <= second[0] - first[-1] - 1 <= 9, "consecutive, but for what did not fit"
    assert writer.tokens == (rows != PAD).sum()
    kept = sum(len(first) + len(second) for first, second in map(segments, rows))
    assert writer.dropped == sum(len(ids) for document in documents for ids in document) - kept


def test_one_row_in_ten_is_of_a_random_length() -> None:
    draw = np.random.default_rng(1)
    rows, _ = written([numbered(600, draw) for _ in range(30)], length=100)
    used = (rows != PAD).sum(1)
    # Of lengths between 8 and 97, and some ids more to the end of a sentence; the last sequence of a document is short
    # too.
    assert 0.07 < (used < 90).mean() < 0.14
    assert (used == 100).mean() > 0.85


def test_where_a_row_is_cut_is_drawn_evenly() -> None:
    rows, _ = written([[[10, 11, 12, 13, 14, 15, 16] for _ in range(900)]])
    lengths = [len(first) for first, second in map(segments, rows) if len(first) + len(second) == ROOM]
    # Full sequences are of three sentences of seven ids.
    assert {7, 14} == set(lengths) and 0.4 < lengths.count(7) / len(lengths) < 0.6


def test_full_stops_do_not_show_which_segment_came_first() -> None:
    """Swapped or not, as many sequences end their first segment with a sentence as end their second with one."""
    stop, draw = 7, np.random.default_rng(2)
    sentences = [[*range(10, 10 + length), stop] for length in draw.integers(3, 30, 6000)]
    rows, _ = written([sentences[start : start + 200] for start in range(0, 6000, 200)], length=64)
    ends = np.array([[first[-1] == stop, second[-1] == stop] for first, second in map(segments, rows)])
    begins = np.array([[first[0] == 10, second[0] == 10] for first, second in map(segments, rows)])
    for shown in (ends, begins):
        only_first, only_second = (shown[:, 0] & ~shown[:, 1]).sum(), (shown[:, 1] & ~shown[:, 0]).sum()
        assert 0.4 < only_first / (only_first + only_second) < 0.6


def test_a_lone_sentence_is_left_out_and_counted() -> None:
    rows, writer = written([[[10, 11, 12, 13, 14, 15, 16, 17, 18]], [[10, 11], [12]]])
    assert len(rows) == 0 and writer.dropped == 12


def prepared(path: Path, tokenizer: Any, cache: Path, **more: Any) -> Tokens:
    given = {"kind": "text", "path": str(path), "sequence_length": 32, "heldout": 0.0, "workers": 1}
    config = text_config(**{**given, "cache": str(cache), **more})
    return prepare(corpus_text(*parts(config)), tokenizer, *parts(config), "all", paired_format)


def test_rows_of_a_text_are_its_sentences_in_order(tmp_path: Path, words: Any) -> None:
    path = tmp_path / "book.txt"
    path.write_text(book(0))
    tokens = prepared(path, words, tmp_path / "cache", kind="gutenberg")
    text = joined(words(clean(path.read_text()), add_special_tokens=False).input_ids)
    assert len(tokens.sequences) > 20
    for row in tokens.sequences[np.arange(50)]:
        middle, end = np.flatnonzero(row == words.sep_token_id)
        assert joined(row[1:middle]) in text and joined(row[middle + 1 : end]) in text


def joined(ids: list[int]) -> str:
    return "".join(f" {number}" for number in ids) + " "


CASES = {
    'He came. She left! "Why?" asked Tom.': ["He came.", " She left!", ' "Why?" asked Tom.'],
    "Mr. Smith met Dr. Jones. They spoke of J. S. Bach.": ["Mr. Smith met Dr. Jones.", " They spoke of J. S. Bach."],
    "It cost 3.50 pounds. 1815 was cold.": ["It cost 3.50 pounds.", " 1815 was cold."],
    'She said "Go." Then he went.': ['She said "Go."', " Then he went."],
    "A title\n\nA paragraph without an end": ["A title", "\n\nA paragraph without an end"],
    "one. two. three": ["one. two. three"],
    "\u5929\u6c17\u3002\u96e8\u3002": ["\u5929\u6c17\u3002", "\u96e8\u3002"],
    "  \n ": [],
    "": [],
}


@pytest.mark.parametrize("text", CASES)
def test_sentences_end_where_a_reader_would_end_them(text: str) -> None:
    assert list(sentences(text)) == CASES[text]
    assert "".join(CASES[text]) == text or not text.strip()
