"""Cuts a text into sentences, by punctuation alone, so that no language model is needed to read a corpus."""

import re
from collections.abc import Iterator

# The blanks behind a full stop, question or exclamation mark (with closing quotes or brackets) and before a capital, a
# digit or an opening quote; and a blank line. East Asian full stops need no blank behind them.
_END = re.compile(
    r"(?<=[.!?\u2026])[\"'\u201d\u2019)\]]*(?=\s+[\"'\u201c\u2018(\[]*[^\W_a-z])|(?<=[\u3002\uff01\uff1f])|(?=\n\s*\n)"
)
# What is followed by a full stop in the middle of a sentence.
_ABBREVIATION = re.compile(r"(?:^|[\s(\"'\u201c])(?:[A-Z]|Mr|Mrs|Ms|Dr|St|Prof|Rev|Hon|Capt|Col|Gen|Lt|No|vol|pp?)\.$")

_TEXT = re.compile(r"\S")


def sentences(text: str) -> Iterator[str]:
    """Stretches that put together are `text`, each but the first with the blanks before it; none is blank."""
    begin = 0
    for end in (match.end() for match in _END.finditer(text)):
        sentence = text[begin:end]
        if sentence.strip() and _TEXT.search(text, end) and not _ABBREVIATION.search(sentence[-8:]):
            yield sentence
            begin = end
    if text[begin:].strip():
        yield text[begin:]
