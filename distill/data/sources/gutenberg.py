"""Project Gutenberg books as they come: header, licence and credits stripped, lines joined to paragraphs."""

import codecs
import re
import zipfile
from collections.abc import Iterator

from distill.data.find_files import File, file_name, is_hidden
from distill.data.readers import LONGEST, InvalidFile, opened
from distill.data.sources import LeftOut
from distill.data.sources._files import FileSource, Found, format_of

_NAME = r"PROJECT\s+GUTENB[EU]RG"
# `*** START OF THE PROJECT GUTENBERG EBOOK X ***`, at times indented, without blanks, or over two or three lines.
_START = re.compile(rf"^[ \t]*\*+\s*START\s+OF\s+(?:TH(?:E|IS)\s+)?{_NAME}.*(?:\n.*){{0,3}}?\*\*\*[ \t]*$", re.I | re.M)
_START_LINE = re.compile(rf"^[ \t]*\*+\s*START\s+OF\s+(?:TH(?:E|IS)\s+)?{_NAME}.*$", re.I | re.M)
_END = re.compile(
    rf"^[ \t]*(?:\*+\s*)?END\s+OF\s+(?:TH(?:E|IS)\s+)?{_NAME}"  # *** END OF ..., End of Project Gutenberg's ...
    rf"|^[ \t]*\*+\s*START:\s+FULL\s+LICENSE",
    re.I | re.M,
)
# The licence of the nineties: `***START**THE SMALL PRINT!...` to `*END*THE SMALL PRINT! ...*END*`.
_SMALL_PRINT = re.compile(r"^[ \t]*\*+\s*START\W*(?:THE\s+)?SMALL\s+PRINT.*$", re.I | re.M)
_SMALL_PRINT_END = re.compile(r"^[ \t]*\*+\s*END\W*(?:THE\s+)?SMALL\s+PRINT.*$", re.I | re.M)

_GUTENBERG = re.compile(rf"{_NAME}|gutenberg\.(?:org|net)|pgdp\.net|\be-?text\b|\btranscriber.s note", re.I)
_GUTENBERG_WORDS = ("gutenb", "pgdp", "text", "transcriber")  # one of them is in whatever the expression matches
_CREDIT = re.compile(
    r"(?:This\s+)?(?:e-?text|e-?book|HTML\s+version|file|edition)?\s*(?:was\s+|has\s+been\s+|is\s+)?"
    r"(?:first\s+)?(?:produced|prepared|transcribed|scanned|typed|created|digiti[sz]ed|proofread|proofed)\b[^.]{0,40}"
    r"\b(?:by|from|for|and)\b|HTML\s+version\s+by|Distributed\s+Proofread",
    re.I,
)
_CREDIT_PARAGRAPHS = 6  # credits are in the first paragraphs after the header, never deep inside a book
_ILLUSTRATION = re.compile(r"\[\s*(?:Illustrations?|Frontispiece)\b[^\]]{0,1000}\]", re.I)
_ITALICS = re.compile(r"(?<!\w)_([^_]+)_(?!_)")
_DECLARED = re.compile(rb"Character set encoding:\s*([\w-]+)", re.I)
_NO_ASCII_LETTERS = [byte for byte in range(256) if not (byte < 128 and chr(byte).isalpha())]
_WORD = re.compile(r"[^\W_]")


class Gutenberg(FileSource):
    word = "Gutenberg"
    suffixes = (".txt", ".zip")
    ranges = False
    usual = ("gutenberg/{split}",)
    hub_names = ("incredible45/Gutenberg-BookCorpus-Cleaned-Data-English",)

    def chosen(self, files: list[File]) -> list[File]:
        return self.of_named_split(files)

    def named(self, place: str, start: int, stop: int | None) -> Iterator[tuple[str, Found]]:
        return super().named(place, start, stop) if format_of(place) else books(place)

    def clean(self, text: str) -> str:
        return clean(text)


def books(place: str) -> Iterator[tuple[str, Found]]:
    """Name and text of the book in a `.txt` or `.txt.gz` file, or of every `.txt` member of a `.zip`.

    Raises:
        InvalidFile: the file is damaged, holds no `.txt`, or is not text.
    """
    try:
        for name, data in _contents(place):
            if len(data) > LONGEST:
                raise InvalidFile(name, f"more than {LONGEST >> 20} MiB, which is no book; read it as kind=text")
            yield name, clean(decode(data, name)) or LeftOut(name, "no text between header and licence")
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError) as error:
        raise InvalidFile(file_name(place), f"{type(error).__name__}: {error}") from error


def _contents(place: str) -> Iterator[tuple[str, bytes]]:
    """Names and bytes, of which at most one more than a book may have, since it is held in memory as a whole."""
    with opened(place) as file:
        if not file_name(place).lower().endswith(".zip"):
            yield file_name(place), file.read(LONGEST + 1)
            return
        with zipfile.ZipFile(file) as archive:
            members = sorted(
                name for name in archive.namelist() if name.lower().endswith(".txt") and not is_hidden(name)
            )
            if not members:
                raise InvalidFile(file_name(place), "no .txt inside")
            for member in members:
                with archive.open(member) as packed:
                    yield f"{file_name(place)}/{member}", packed.read(LONGEST + 1)


def decode(data: bytes, name: str) -> str:
    """UTF-8 (a byte order mark is dropped), else the encoding that the header declares, else Windows Latin-1.

    Raises:
        InvalidFile: the bytes are no text, or mostly no Latin letters, in an encoding that no header declares.
    """
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return data.decode("utf-16", errors="replace")
    if b"\0" in data:
        raise InvalidFile(name, "not text (it has zero bytes)")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        pass
    declared = _DECLARED.search(data[:4096])
    encodings = [declared[1].decode()] if declared and declared[1].lower() not in (b"utf-8", b"ascii") else []
    letters, ascii_letters = (len(data.translate(None, bytes(others))) for others in (range(128), _NO_ASCII_LETTERS))
    if not encodings and letters > ascii_letters:
        raise InvalidFile(
            name,
            "not UTF-8, nor in Latin letters, and its header declares no encoding; read it by corpus=text "
            "corpus.encoding=NAME",
        )
    for encoding in [*encodings, "cp1252"]:
        try:
            return data.decode(encoding)
        except (UnicodeDecodeError, LookupError):
            continue
    return data.decode("latin-1")


def clean(text: str) -> str:
    """The book alone: header, footer, licence and credits gone, lines joined to paragraphs parted by a blank line.

    Illustration marks and lines without a letter or digit are dropped, `_italics_` lose their marks. Verse becomes a
    paragraph like any other. Any paragraph that names Project Gutenberg or its etexts is dropped: no book of its time
    does.
    """
    text = strip(_newlines(text))
    text = _ILLUSTRATION.sub("", text)
    paragraphs = [_join(block) for block in re.split(r"\n[^\S\n]*(?:\n[^\S\n]*)+", text)]
    paragraphs = [p for p in paragraphs if _WORD.search(p)]
    head = [p for p in paragraphs[:_CREDIT_PARAGRAPHS] if not _CREDIT.match(p)]
    return "\n\n".join(p for p in head + paragraphs[_CREDIT_PARAGRAPHS:] if not _names_gutenberg(p))


# The expressions below are slow, so texts in which they cannot match are passed over: books are read whole even
# where only a few stretches of them are tokenized.
def _newlines(text: str) -> str:
    """`text` with every end of a line, of whatever system, as one newline."""
    text = text.replace("\r\n", "\n")
    return re.sub(r"\r+\n?", "\n", text) if "\r" in text else text


def _names_gutenberg(paragraph: str) -> bool:
    lower = paragraph.lower().replace("\u017f", "s")  # the old long s, which expressions without case match, too
    return any(word in lower for word in _GUTENBERG_WORDS) and _GUTENBERG.search(paragraph) is not None


def strip(text: str) -> str:
    """`text` (newlines as `\\n`) without what is before and after the book; whole where no mark is found."""
    start = _START.search(text) or _START_LINE.search(text)
    begin = start.end() if start else 0
    end = _END.search(text, begin)
    stop = end.start() if end else len(text)
    first, last = _SMALL_PRINT.search(text, begin, stop), _SMALL_PRINT_END.search(text, begin, stop)
    if last:  # the small print is before the book or after it; the book is the longer side
        before = (first.start() if first and first.start() < last.start() else last.start()) - begin
        begin, stop = (last.end(), stop) if stop - last.end() >= before else (begin, begin + before)
    return text[begin:stop]


def _join(block: str) -> str:
    """One paragraph from its hard-wrapped lines; a hyphen or dash at a line's end keeps its word together."""
    lines = "\n".join(line.strip() for line in block.split("\n") if _WORD.search(line))
    if "-\n" in lines:
        lines = re.sub(r"(?<=\S-)\n", "", lines)
    lines = lines.replace("\n", " ")
    return _ITALICS.sub(r"\1", lines) if "_" in lines else lines
