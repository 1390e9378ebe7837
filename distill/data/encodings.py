"""Guesses the encoding of bytes that are not UTF-8, for messages: a person has to decide."""

import codecs
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from distill.runtime.errors import SettingError

MAX_NAMES = 2  # names in a guess
FEWEST = 4  # characters beyond ASCII; from fewer nothing can be guessed
LEAST = 0.5  # of the usual fraction
_MARKS = {
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}


class Candidate(NamedTuple):
    """An encoding, and which characters beyond ASCII a text in it mostly has."""

    name: str
    usual: Callable[[str], bool]
    fraction: float  # of the characters beyond ASCII that are such ones in a usual text, or less


def _between(*ranges: tuple[str, str]) -> Callable[[str], bool]:
    return lambda character: any(first <= character <= last for first, last in ranges)


# The forty or so most frequent characters make up about a quarter of a Chinese text.
_FREQUENT_SIMPLIFIED = "的一是不了在人有我他这个们中来上大为和国地到以说时要就出会可也你对生能而子那得于"
_FREQUENT_TRADITIONAL = "的一是不了在人有我他這個們中來上大為和國地到以說時要就出會可也你對生能而子那得於"

# A text in the wrong one of them decodes, too, but to other characters. Of equals the first is named first.
_CANDIDATES = (
    Candidate("gb18030", _FREQUENT_SIMPLIFIED.__contains__, 0.2),
    Candidate("big5", _FREQUENT_TRADITIONAL.__contains__, 0.2),
    Candidate("shift_jis", _between(("\u3041", "\u30fe")), 0.4),  # kana
    Candidate("euc_jp", _between(("\u3041", "\u30fe")), 0.4),
    Candidate("euc_kr", _between(("\uac00", "\ud7a3")), 0.9),
    Candidate("cp1251", _between(("\u0430", "\u044f")), 0.8),  # small Cyrillic letters
    Candidate("koi8_r", _between(("\u0430", "\u044f")), 0.8),
    Candidate("cp1252", _between(("\xdf", "\xff"), ("\u2013", "\u2026")), 0.8),  # small Latin letters, dashes, quotes
)


def guess(sample: bytes) -> list[str]:
    """The names of the encodings that the bytes may be in, the likeliest first; at most two, none where none fits.

    The measure is the fraction of characters beyond ASCII that are of the kind that is common in texts of that
    encoding, divided by the fraction in a usual text, 1 at most.
    """
    for mark, name in _MARKS.items():
        if sample.startswith(mark):
            return [name]
    if b"\0" in sample:
        return []
    scores = {candidate.name: _score(candidate, sample) for candidate in _CANDIDATES}
    likely = sorted((name for name in scores if scores[name] >= LEAST), key=lambda name: -scores[name])
    return [name for name in likely if scores[name] > 0.8 * scores[likely[0]]][:MAX_NAMES]


def _score(candidate: Candidate, sample: bytes) -> float:
    decoder = codecs.getincrementaldecoder(candidate.name)()  # the sample may end within a character
    try:
        text = decoder.decode(sample)
    except UnicodeDecodeError:
        return 0.0
    beyond = Counter(character for character in text if character > "\x7f")
    if beyond.total() < FEWEST:
        return 0.0
    latin = sum(character.isascii() and character.isalpha() for character in text)
    if beyond.total() > latin if candidate.name == "cp1252" else latin > 2 * beyond.total():
        return 0.0  # most letters of a Latin text, and few of any other, are ASCII
    fraction = sum(count for character, count in beyond.items() if candidate.usual(character)) / beyond.total()
    return min(1.0, fraction / candidate.fraction)


def check_encoding(encoding: str | None, setting: str) -> None:
    """Raises SettingError where files cannot be read in this encoding; `setting` names their source."""
    if encoding is None:
        return
    try:
        if codecs.lookup(encoding).name == "utf-8-sig":  # a byte order mark is dropped from any UTF-8
            return
        readable = codecs.lookup(encoding)._is_text_encoding and "\n".encode(encoding) == b"\n"
        if readable:  # some can only be strict
            codecs.getincrementaldecoder(encoding)(errors="replace").decode(b"\xff\n", True)
    except (LookupError, ValueError):
        raise SettingError(
            f"{setting}.encoding={encoding} is no encoding of Python: write gb18030, cp1252, shift_jis ..."
        ) from None
    if not readable:
        raise SettingError(
            f"{setting}.encoding={encoding} does not end lines with one byte 10: convert the files to UTF-8, as with "
            f"`iconv -f {encoding} -t UTF-8`"
        )
