"""The lines of a file, plain or compressed, in bounded memory; one that is damaged is left out and named."""

import bz2
import codecs
import gzip
import io
import lzma
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

PART = 1 << 20  # bytes; a longer line comes in parts where that is wanted
LONGEST = 16 << 20  # bytes of one record, or of one document, that are held in memory
COMPRESSED = (".gz", ".bz2", ".xz", ".zst", ".zstd", ".lz4")  # suffixes of files that are unpacked as they are read
ARCHIVES = ("a ZIP archive", "a 7z archive")
# How files begin that are compressed, and those that hold others.
MARKS = {
    b"\x1f\x8b": "gzip",
    **{b"BZh%d1AY&SY" % level: "bzip2" for level in range(1, 10)},
    b"\xfd7zXZ\0": "xz",
    b"\x28\xb5\x2f\xfd": "zstd",
    **{bytes([0x50 + number, 0x2A, 0x4D, 0x18]): "zstd" for number in range(16)},  # a frame of notes is first
    b"\x04\x22\x4d\x18": "lz4",
    b"PK\3\4": ARCHIVES[0],
    b"7z\xbc\xaf\x27\x1c": ARCHIVES[1],
}
LONGEST_MARK = max(map(len, MARKS))
UNREADABLE = (OSError, EOFError, zlib.error, lzma.LZMAError)  # what reading raises of a file that is damaged, or cut
WIDE = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)  # how texts in UTF-16 begin


class InvalidFile(Exception):
    """A file that cannot be used: its name, and the reason in a few words."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(name, reason)
        self.name, self.reason = name, " ".join(reason.split())

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}"


Record = dict[str, Any]  # of the user's data: what its fields hold, by the names that they have there


class InvalidRecord(NamedTuple):
    """A record, or a line of plain text, that cannot be used, while what follows it in the file can."""

    name: str  # the file and the place in it, such as `a.jsonl, line 7`
    reason: str
    setting: bool = False  # whether a setting is the reason, if all other records are bad, too

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}"


class LeftOut(NamedTuple):
    """A record, or a part of one, that can be read and is not used; that is counted and no fault."""

    name: str
    reason: str


def lines(path: Path, limit: int = PART, whole_lines: bool = False) -> Iterator[str]:
    """The lines as `sound_lines` gives them, of a UTF-8 file that has to be right as a whole.

    Raises:
        InvalidFile: damaged, or not of this encoding.
    """
    for line in sound_lines(path, limit=limit, whole_lines=whole_lines):
        if isinstance(line, InvalidRecord):
            raise InvalidFile(line.name, line.reason)
        yield line


def sound_lines(
    path: Path,
    start: int = 0,
    stop: int | None = None,
    limit: int = PART,
    encoding: str | None = None,
    whole_lines: bool = False,
) -> Iterator[str | InvalidRecord]:
    """The lines of a file that begin in bytes [start, stop), and in their places those that are damaged.

    Args:
        limit: bytes; a longer line comes in parts of that length.
        encoding: in which the end of a line is the byte 10, as in all but UTF-16 and UTF-32; None: UTF-8.
        whole_lines: a line over the limit is a bad record, not parts.

    Raises:
        InvalidFile: the file cannot be read (further), or is no text.
    """
    try:
        with open_bytes(path) as file:
            if start:  # the line that crosses `start` belongs to the part before
                file.seek(start - 1)
                start += _skip_line(file) - 1
            yield from _decoded(_Place(path, start, stop), file, limit, encoding or "utf-8", whole_lines)
    except UNREADABLE as error:
        raise InvalidFile(path.name, f"{type(error).__name__}: {error}") from error


def plain_name(name: str) -> str:
    """The name of a file in small letters, without the suffix of a compression: `A.TXT.gz` -> `a.txt`."""
    name = name.lower()
    return next((name.removesuffix(suffix) for suffix in COMPRESSED if name.endswith(suffix)), name)


def compression_of(path: Path) -> str | None:
    """By what a file is compressed, by its first bytes, whatever its name is; None: by nothing that is known."""
    with path.open("rb") as file:
        head = file.read(LONGEST_MARK)
    return next((name for mark, name in MARKS.items() if head.startswith(mark)), None)


def open_bytes(path: Path) -> IO[bytes]:
    """The content of a file, unpacked where it is compressed.

    Raises:
        InvalidFile: an archive of several files, or one that only its name calls compressed.
    """
    compression = compression_of(path)
    if compression in ARCHIVES:
        raise InvalidFile(path.name, f"{compression}, which holds files: unpack it")
    if compression is None and plain_name(path.name) != path.name.lower():
        raise InvalidFile(path.name, f"not compressed, though its name ends in {path.suffix}: mend or rename it")
    # A path is given as such, so that the file is closed with what unpacks it.
    file: Any = path if isinstance(path, Path) else path.open("rb")
    match compression:
        case None:
            return path.open("rb")
        case "gzip":
            return gzip.open(file, "rb")
        case "bzip2":
            return bz2.open(file, "rb")
        case "xz":
            return lzma.open(file, "rb")
    import pyarrow

    return io.BufferedReader(pyarrow.input_stream(str(path) if isinstance(path, Path) else file, compression))


class _Place(NamedTuple):
    """A file and the bytes of it that count."""

    path: Path
    start: int
    stop: int | None

    def line(self, number: int) -> str:
        """For messages."""
        behind = f" after byte {self.start:,}" if self.start else ""
        return f"{self.path.name}, line {number:,}{behind}"


def _decoded(
    place: _Place, file: IO[bytes], limit: int, encoding: str, whole_lines: bool
) -> Iterator[str | InvalidRecord]:
    decoder = codecs.getincrementaldecoder(encoding)()
    lenient = codecs.getincrementaldecoder(encoding)(errors="replace")
    at, number, ends = place.start, 1, True
    while (not ends or place.stop is None or at < place.stop) and (raw := file.readline(limit)):
        ends = raw.endswith(b"\n")
        final = ends or len(raw) < limit
        before = decoder.getstate()
        size = len(raw)
        if whole_lines and not final and (skipped := _skip_line(file)):
            size += skipped
            ends = True
            yield InvalidRecord(place.line(number), f"a line of more than {limit >> 20:,} MiB")
        else:
            try:
                line = decoder.decode(raw, final)
            except UnicodeDecodeError as error:
                # The next part of a long line begins in the middle of a character, with the bytes before it.
                lenient.setstate(before)
                lenient.decode(raw, final)
                decoder.setstate(lenient.getstate())
                if at == 0 and raw.startswith(WIDE):
                    raise InvalidFile(place.path.name, "UTF-16: convert it to UTF-8") from error
                name = "UTF-8" if encoding == "utf-8" else encoding
                reason = f"not {name} near byte {at + error.start:,} ({error.reason})"
                yield InvalidRecord(place.line(number), reason)
            else:
                yield _checked(place, line, at, number)
        at += size
        number += ends
    if decoder.getstate()[0]:
        yield InvalidRecord(place.line(number), "it ends within a character")


def _checked(place: _Place, line: str, at: int, number: int) -> str | InvalidRecord:
    """The line as it is used; a file that begins with zero bytes is no text at all."""
    if "\0" in line:
        if at == 0:
            raise InvalidFile(place.path.name, "not text (it has zero bytes)")
        return InvalidRecord(place.line(number), "zero bytes")
    return (line.removeprefix("\ufeff") if at == 0 else line).replace("\r\n", "\n")


def _skip_line(file: IO[bytes]) -> int:
    """Reads up to the end of the line in parts; gives the number of its bytes."""
    count = 0
    part: Callable[[], bytes] = lambda: file.readline(PART)  # noqa: E731
    for raw in iter(part, b""):
        count += len(raw)
        if raw.endswith(b"\n"):
            break
    return count
