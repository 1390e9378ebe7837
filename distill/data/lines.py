"""The lines of a file, plain or gzip, in bounded memory; one that is damaged is left out and named."""

import codecs
import gzip
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

from distill.data.encodings import guess

PART = 1 << 20  # bytes; a longer line comes in parts where that is wanted
LONGEST = 16 << 20  # bytes of one record, or of one document, that are held in memory
SAMPLE = 64 << 10  # bytes from which an encoding is guessed


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
    except (OSError, EOFError, zlib.error) as error:
        raise InvalidFile(path.name, f"{type(error).__name__}: {error}") from error


def open_bytes(path: Path) -> IO[bytes]:
    """The content of a file, unpacked where its name ends in .gz."""
    if not path.name.lower().endswith(".gz"):
        return path.open("rb")
    # A path is given as such, so that the file is closed with what unpacks it.
    return gzip.open(path if isinstance(path, Path) else path.open("rb"), "rb")  # type: ignore[return-value]


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
    hint: str | None = None
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
                hint = _hint(place.path, at, encoding) if hint is None else hint
                name = "UTF-8" if encoding == "utf-8" else encoding
                reason = f"not {name} near byte {at + error.start:,} ({error.reason}){hint}"
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
            raise InvalidFile(place.path.name, "not text (it has zero bytes)" + _hint(place.path, 0, "utf-8"))
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


def _hint(path: Path, at: int, encoding: str) -> str:
    """What the encoding may be instead, as the end of a reason; nothing where no other one fits."""
    with open_bytes(path) as file:
        file.seek(at)
        names = [name for name in guess(file.read(SAMPLE)) if name != encoding]
    return f"; it reads like {' or '.join(names)}" if names else ""
