"""Sentences by punctuation: together they are the text, and they end where a reader would end them."""

import pytest

from distill.data.sentences import sentences

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
def test_cases(text: str) -> None:
    assert list(sentences(text)) == CASES[text]


@pytest.mark.parametrize("text", [text for text in CASES if text.strip()])
def test_nothing_is_lost(text: str) -> None:
    assert "".join(sentences(text)) == text
