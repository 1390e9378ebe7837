"""The rows of CSV and TSV files in bounded memory; one that is damaged is left out and named."""

import csv
from collections import deque
from collections.abc import Iterator
from pathlib import Path

from distill.data.lines import LONGEST, InvalidFile, InvalidRecord, Record, plain_name, sound_lines
from distill.data.readers import unfit_field

_PLAIN = (".csv", ".tsv")
SUFFIXES = (*_PLAIN, *(f"{suffix}.gz" for suffix in _PLAIN))
LONGEST_FIELD = 1 << 30  # characters; Python's own limit is 131,072
SPAN = LONGEST  # characters; a row that has not ended by then was begun by a stray quotation mark


def allow_long_fields() -> None:
    """Raises the limit of the process for fields, which another reader or a program may have raised further."""
    csv.field_size_limit(max(csv.field_size_limit(), LONGEST_FIELD))


def is_table(path: Path) -> bool:
    """Whether the name of a file is that of a CSV or TSV file."""
    return plain_name(path.name).endswith(_PLAIN)


def separated_rows(path: Path, fields: dict[str, str], encoding: str | None = None) -> Iterator[Record | InvalidRecord]:
    """The rows of a CSV or TSV file as records by the names of its header, and those that are damaged.

    In CSV files a field in quotation marks may hold commas and ends of lines; in TSV files a quotation mark is a
    character like any other. After a damaged row reading continues with the line behind that in which it began, so that
    a stray quotation mark does not take what follows it along.

    Args:
        fields: the columns that are wanted, by the setting that names each.

    Raises:
        SettingError: the header lacks one of them.
        InvalidFile: the file cannot be read (further).
    """
    allow_long_fields()
    names: list[str] = []
    split = _unquoted if plain_name(path.name).endswith(".tsv") else _quoted
    for row in split(path, encoding, names):
        if isinstance(row, InvalidRecord):
            if not names:
                raise InvalidFile(path.name, f"its header is damaged: {row.reason}")
            yield row
        elif names:
            yield dict(zip(names, row, strict=True))
        else:
            names += [name.strip() for name in row]
            for setting, field in fields.items():
                if (error := unfit_field(field, names, path.name, setting)) is not None:
                    raise error


def _unquoted(path: Path, encoding: str | None, names: list[str]) -> Iterator[list[str] | InvalidRecord]:
    for number, line in _numbered(path, encoding):
        if isinstance(line, InvalidRecord):
            yield line
        elif line.strip():
            row = line.rstrip("\r\n").split("\t")
            yield row if len(row) == (len(names) or len(row)) else _wrong_length(path, number, len(row), names)


def _quoted(path: Path, encoding: str | None, names: list[str]) -> Iterator[list[str] | InvalidRecord]:
    lines = _Lines(path, encoding)
    while lines.more():
        if isinstance(first := lines.waiting[0][1], InvalidRecord):
            lines.waiting.popleft()
            yield first
            continue
        number = lines.waiting[0][0]
        try:
            row = next(csv.reader(lines.of_one_row(), strict=True))
        except csv.Error as error:
            lines.back_to_second()
            yield InvalidRecord(f"{path.name}, line {number:,}", str(error))
            continue
        if row and len(row) != (len(names) or len(row)):
            lines.back_to_second()
            yield _wrong_length(path, number, len(row), names)
        elif row:
            yield row


def _wrong_length(path: Path, number: int, length: int, names: list[str]) -> InvalidRecord:
    return InvalidRecord(f"{path.name}, line {number:,}", f"{length} fields, not the {len(names)} of the header")


def _numbered(path: Path, encoding: str | None) -> Iterator[tuple[int, str | InvalidRecord]]:
    return enumerate(sound_lines(path, limit=LONGEST, encoding=encoding, whole_lines=True), 1)


class _Lines:
    """Numbered lines that can be given back.

    Attributes:
        waiting: the next ones, at least one after `more` returned true.
    """

    def __init__(self, path: Path, encoding: str | None) -> None:
        self._rest = _numbered(path, encoding)
        self.waiting: deque[tuple[int, str | InvalidRecord]] = deque()
        self._taken: list[tuple[int, str | InvalidRecord]] = []

    def more(self) -> bool:
        if not self.waiting and (line := next(self._rest, None)) is not None:
            self.waiting.append(line)
        return bool(self.waiting)

    def of_one_row(self) -> Iterator[str]:
        """Lines one by one, up to a damaged one, or to the length that a row may have."""
        self._taken, size = [], 0
        while (size < SPAN or not self._taken) and self.more() and isinstance(line := self.waiting[0][1], str):
            self._taken.append(self.waiting.popleft())
            size += len(line)
            yield line

    def back_to_second(self) -> None:
        """Gives back what the last row took, without its first line."""
        self.waiting.extendleft(reversed(self._taken[1:]))
