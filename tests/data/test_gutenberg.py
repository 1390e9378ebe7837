"""Gutenberg files in all the forms they come in give the book and nothing but the book."""

import gzip
import os
import zipfile
from pathlib import Path

import pytest

from distill.data.readers import InvalidFile
from distill.data.sources import LeftOut, gutenberg
from distill.data.sources.gutenberg import books, clean, decode

BODY = """CHAPTER I

It was a bright morning in the well-
known village, and nobody--
or so they _said_--had seen
the stranger come.

"End of the road," he said. "The _Nautilus_ sails at noon."
"""
BOOK = (
    "CHAPTER I\n\n"
    "It was a bright morning in the well-known village, and nobody--or so they said--had seen the stranger come.\n\n"
    '"End of the road," he said. "The Nautilus sails at noon."'
)
HEAD = "The Project Gutenberg EBook of A Tale, by A. Nonymous\n\nTitle: A Tale\nCharacter set encoding: {}\n\n"
LICENCE = "\n\nUpdated editions will replace the previous one.\n\n*** START: FULL LICENSE ***\n\nSection 1. Terms.\n"
SMALL_PRINT = (
    "***START**THE SMALL PRINT!**FOR PUBLIC DOMAIN ETEXTS**START***\nWhy is this here? You know: lawyers.\n\n"
    "*END*THE SMALL PRINT! FOR PUBLIC DOMAIN ETEXTS*Ver.04.29.93*END*\n\n"
)


def pg(start: str, end: str) -> str:
    return HEAD.format("UTF-8") + start + "\n\n" + BODY + "\n\n" + end + LICENCE


VARIANTS = {
    "pg": pg(
        "*** START OF THIS PROJECT GUTENBERG EBOOK A TALE ***", "*** END OF THIS PROJECT GUTENBERG EBOOK A TALE ***"
    ),
    "no blanks": pg(
        "***START OF THE PROJECT GUTENBERG EBOOK A TALE***", "***END OF THE PROJECT GUTENBERG EBOOK A TALE***"
    ),
    "two lines": pg(
        "*** START OF THIS PROJECT GUTENBERG EBOOK\nA TALE, OR THE STRANGER ***",
        "*** END OF THIS PROJECT GUTENBERG EBOOK\nA TALE, OR THE STRANGER ***",
    ),
    "indented": "\n".join(
        "  " + line
        for line in pg("*** START OF THIS PROJECT GUTENBERG EBOOK X ***", "End of Project Gutenberg's X").split("\n")
    ),
    "credits": pg(
        "*** START OF THE PROJECT GUTENBERG EBOOK A TALE ***\n\nProduced by Jane Doe and the Online Distributed\n"
        "Proofreading Team at http://www.pgdp.net\n\nHTML version by John Roe.",
        "End of Project Gutenberg's A Tale, by A. Nonymous\n\n*** END OF THE PROJECT GUTENBERG EBOOK A TALE ***",
    ),
    "end over two lines": pg(
        "*** START OF THE PROJECT GUTENBERG EBOOK A TALE ***",
        "End of The Project Gutenberg Etext of A Tale, of\nThe Stranger\n\n*** END OF THE PROJECT GUTENBERG EBOOK***",
    ),
    "small print": "**Welcome To The World of Free Plain Vanilla Electronic Texts**\n\nIt is a joy to give.\n\n"
    + SMALL_PRINT
    + "A Tale, prepared by hand for Project Gutenberg.\n\n"
    + BODY
    + "\n\nEnd of The Project Gutenburg Etext of A Tale\n",
    "small print, no end": "Welcome!\n\n"
    + SMALL_PRINT
    + BODY
    + "\n*Project Gutenberg Etext of A Tale, by A. Nonymous*\n",
    "footer only": BODY
    + "\nEnd of Project Gutenberg's A Tale\n\n*** END OF THE PROJECT GUTENBERG EBOOK ***\n"
    + SMALL_PRINT,
    "small print at the end": BODY + "\n\n" + SMALL_PRINT,
    "none": BODY,
}


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("newline", ["\n", "\r\n", "\r\r\n"])
def test_every_variant_gives_the_same_book(name: str, newline: str) -> None:
    assert clean(VARIANTS[name].replace("\n", newline)) == BOOK


def test_illustrations_rules_and_doubled_blanks_go() -> None:
    marks = "[Illustration]\n\n * * * * *\n\n[Illustration: A ship\nat sea]\n\n \t\n\n\n"
    text = f"One.\n\n{marks}Two snake_case words.\n-----\nEnd."
    assert clean(text) == "One.\n\nTwo snake_case words. End."


def test_a_book_that_speaks_of_ends_and_makers_keeps_its_text() -> None:
    lines = ["The end of the project was near.", "At the END of it all, START again.", *"CDEF", "Produced by nobody."]
    assert clean("\n\n".join(lines)) == "\n\n".join(lines)


@pytest.mark.parametrize(
    ("data", "text"),
    [
        ("Émile".encode(), "Émile"),
        (b"\xef\xbb\xbf" + "Émile".encode(), "Émile"),
        ("Émile".encode("latin-1"), "Émile"),
        (
            "Character set encoding: ISO-8859-2\n\nŁódź".encode("iso-8859-2"),
            "Character set encoding: ISO-8859-2\n\nŁódź",
        ),
        (
            "Character set encoding: ISO Latin-99\n\nÉmile".encode("latin-1"),
            "Character set encoding: ISO Latin-99\n\nÉmile",
        ),
        ("“quoted”".encode("cp1252"), "“quoted”"),
        ("Émile".encode("utf-16"), "Émile"),
    ],
)
def test_encodings(data: bytes, text: str) -> None:
    assert decode(data, "x.txt") == text


def test_plain_gzip_and_zip_hold_the_same_book(tmp_path: Path) -> None:
    data = VARIANTS["pg"].replace("\n", "\r\n").encode()
    (tmp_path / "a.txt").write_bytes(data)
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(data))
    with zipfile.ZipFile(tmp_path / "c.zip", "w") as archive:
        archive.writestr("c/picture.png", b"\x89PNG\0")
        archive.writestr("c/c.txt", data)
    for name in ("a.txt", "b.txt.gz", "c.zip"):
        assert [text for _, text in books(str(tmp_path / name))] == [BOOK]


@pytest.mark.parametrize(
    ("name", "data", "reason"),
    [
        ("cut.txt.gz", gzip.compress(os.urandom(9000))[:4000], "EOFError"),
        ("false.txt.gz", b"no gzip at all", "BadGzipFile"),
        ("false.zip", b"no zip at all", "BadZipFile"),
        ("picture.txt", b"\x89PNG\0\0\0", "zero bytes"),
        ("chinese.txt", ("他说的话是在那里的人都不知道的事情" * 9).encode("gbk"), "corpus.encoding=NAME"),
        ("gone.txt", None, "FileNotFoundError"),
    ],
    ids=lambda value: "data" if isinstance(value, bytes) else value,  # random bytes differ from worker to worker
)
def test_what_is_no_book_is_named_with_its_reason(tmp_path: Path, name: str, data: bytes | None, reason: str) -> None:
    if data is not None:
        (tmp_path / name).write_bytes(data)
    with pytest.raises(InvalidFile, match=reason) as caught:
        list(books(str(tmp_path / name)))
    assert caught.value.name == name and "\n" not in str(caught.value)


def test_a_licence_without_a_book_is_left_out(tmp_path: Path) -> None:
    marks = ("*** START OF THE PROJECT GUTENBERG EBOOK X ***", "*** END OF THE PROJECT GUTENBERG EBOOK X ***")
    for content in (b" \r\n\r\n", pg(*marks).replace(BODY, "").encode()):
        (tmp_path / "a.txt").write_bytes(content)
        assert [*books(str(tmp_path / "a.txt"))] == [("a.txt", LeftOut("a.txt", "no text between header and licence"))]


def test_a_damaged_zip_member_is_unreadable(tmp_path: Path) -> None:
    path = tmp_path / "x.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("x.txt", BODY)
    data = bytearray(path.read_bytes())
    data[60] ^= 0xFF
    path.write_bytes(data)
    with pytest.raises(InvalidFile, match="CRC"):
        list(books(str(path)))


@pytest.mark.skipif("DISTILL_DATA" not in os.environ, reason="real books are not part of the project")
def test_real_books_keep_their_text_and_lose_the_rest() -> None:
    files = sorted(Path(os.environ["DISTILL_DATA"]).glob("gutenberg/*/*.txt.gz"))
    for path in files[::12]:
        (_, text), *others = books(str(path))
        assert not others and not gutenberg._GUTENBERG.search(str(text))
        assert len(str(text)) > 0.95 * len(gzip.decompress(path.read_bytes())) - 30_000
