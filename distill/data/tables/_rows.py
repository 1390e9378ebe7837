"""The rows of tables in CSV, TSV, JSONL and Parquet files or on the Hub, and the texts and labels that they hold."""

import csv
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from distill.data import readers
from distill.data.lines import LONGEST, InvalidFile, InvalidRecord, Record, plain_name
from distill.data.separated import allow_long_fields
from distill.data.tables import TableConfig
from distill.runtime.errors import SettingError

PLAIN = (".csv", ".tsv", ".jsonl")
SUFFIXES = (*PLAIN, *(f"{suffix}.gz" for suffix in PLAIN), ".parquet")


class Row(NamedTuple):
    """One row, and where it stands."""

    place: str  # for messages, such as `dev.tsv, line 17`
    values: Record | None  # None: it has another number of fields than the header


class Columns(NamedTuple):
    """The columns that count, and the name of the setting that names each, such as `data.text`."""

    first: str
    second: str | None
    label: str | None  # None: the rows are read without labels
    setting: str

    @property
    def fields(self) -> dict[str, str]:
        """The columns by the setting that names each."""
        columns = {"text": self.first, "second": self.second, "label": self.label}
        return {f"{self.setting}.{name}": column for name, column in columns.items() if column is not None}

    def check(self) -> None:
        """Raises SettingError where one column is two of them, such as the text and its label."""
        settings: dict[str, str] = {}  # by column
        for setting, column in self.fields.items():
            if column in settings:
                raise SettingError(
                    f"{setting}={column} is also {settings[column]}: name another column for one of them"
                )
            settings[column] = setting


class Collected(NamedTuple):
    """What a table's rows hold, and how many were left out by reason."""

    first: list[str]
    second: list[str] | None
    labels: list[Any]
    left_out: Counter[str]


def read_rows(
    table: TableConfig,
    setting: str,
    files: Sequence[Path],
    fields: dict[str, str],
    header: tuple[str, ...] = (),
    quotes: bool | None = None,
) -> Iterator[Row]:
    """The rows of these files, or of the Hub data set where there are none.

    Args:
        setting: what error lines call `table`.
        fields: the columns that are wanted, by the setting that names each.
        header: the columns of CSV and TSV files whose first line is a row already, and does not name what is wanted.
        quotes: whether fields of CSV and TSV files may be in quotation marks; None: in CSV, not in TSV.

    Raises:
        SettingError: a file or data set cannot be read, or lacks a column.
    """
    if not files:
        assert table.hub is not None
        yield from _hub_rows(table, setting, fields)
    yield from read_files(files, f"{setting}.path", fields, header, quotes)


def read_files(
    files: Sequence[Path],
    setting: str,
    fields: dict[str, str],
    header: tuple[str, ...] = (),
    quotes: bool | None = None,
) -> Iterator[Row]:
    """The rows of these files; arguments as in `read_rows`, but that `setting` names the files themselves.

    Raises:
        SettingError: a file cannot be read, or lacks a column.
    """
    for path in files:
        kind = kind_of(path)
        try:
            if kind == "parquet":
                yield from _numbered(path, readers.columns(path, fields))
            elif kind in ("json", "jsonl"):
                yield from _numbered(path, _with_fields(path, fields))
            elif kind in ("csv", "tsv", "txt"):
                yield from _separated(path, fields, header, kind, quotes)
            else:
                raise InvalidFile(path.name, "its name has none of the endings *.csv, *.tsv, *.jsonl or *.parquet")
        except InvalidFile as error:
            raise SettingError(f"{setting}={path}: {error}; mend or remove that") from error


def kind_of(path: Path) -> str:
    """The last suffix of a file's name, that of compression aside: `dev.tsv.gz` -> `tsv`."""
    return plain_name(path.name).rpartition(".")[2]


def collect(
    rows: Iterable[Row], columns: Columns, parse: Callable[[Any], Any], training: bool, setting: str | None = None
) -> Collected:
    """The texts and labels of rows. Training does without bad rows and counts them; evaluation has to have them all.

    Args:
        parse: the label of a field's content; raises ValueError with the reason where it is none.
        setting: what error lines call the rows; None: as they call the columns.

    Raises:
        SettingError: a bad row in evaluation, or a column that holds something else than text.
    """
    first: list[str] = []
    second: list[str] = []
    labels: list[Any] = []
    left_out: Counter[str] = Counter()
    for row in rows:
        try:
            text, other, label = _parsed(row, columns, parse, training)
        except SettingError:
            raise
        except ValueError as error:
            if not training:
                raise SettingError(
                    f"{columns.setting}: {row.place}: {error}; mend that row (every row of an evaluation set counts)"
                ) from error
            left_out[str(error)] += 1
            continue
        first.append(text)
        second.append(other)
        labels.append(label)
    if not labels:
        reasons = ", ".join(f"{reason} ({count:,})" for reason, count in left_out.items()) or "it is empty"
        prefix = setting or columns.setting
        raise SettingError(f"{prefix}: not one row to use: {reasons}; check the file and the columns")
    return Collected(first, None if columns.second is None else second, labels, left_out)


def _parsed(row: Row, columns: Columns, parse: Callable[[Any], Any], training: bool) -> tuple[str, str, Any]:
    if row.values is None:
        raise ValueError("another number of fields than the header has")
    text, other = (
        readers.value_of(row.values, column, row.place, setting, str) if column is not None else ""
        for column, setting in (
            (columns.first, f"{columns.setting}.text"),
            (columns.second, f"{columns.setting}.second"),
        )
    )
    if training and not (text.strip() and (columns.second is None or other.strip())):
        raise ValueError("no text")  # in evaluation a model has to answer all the same
    if not (readers.has_utf8(text) and readers.has_utf8(other)):
        raise ValueError("half a surrogate pair in its text")
    return text, other, None if columns.label is None else parse(row.values[columns.label])


def _numbered(path: Path, records: Iterable[Record | InvalidRecord]) -> Iterator[Row]:
    for number, record in enumerate(records, 1):
        if isinstance(record, InvalidRecord):
            raise InvalidFile(record.name, record.reason)
        yield Row(f"{path.name}, row {number}", record)


def _with_fields(path: Path, fields: dict[str, str]) -> Iterator[Record | InvalidRecord]:
    """The records of a JSONL file. Those after the first may lack a field, which is null then."""
    is_first = True
    for record in readers.records(path):
        if isinstance(record, InvalidRecord):
            yield record
            continue
        if is_first:
            _check_fields(fields, list(record), path.name)
        is_first = False
        yield dict.fromkeys(fields.values()) | record


def _separated(
    path: Path, fields: dict[str, str], header: tuple[str, ...], kind: str, quotes: bool | None
) -> Iterator[Row]:
    """The rows of a CSV or TSV file; a row of another length than the header has no values."""
    split = _quoted if (kind == "csv" if quotes is None else quotes) else _unquoted
    names = list(header)
    for number, values in split(path, "," if kind == "csv" else "\t"):
        if not names or (number == 1 and {*fields.values()} <= {name.strip() for name in values}):
            names = [name.strip() for name in values]
            _check_fields(fields, names, path.name)
        else:
            same = len(values) == len(names)
            yield Row(f"{path.name}, line {number}", dict(zip(names, values, strict=True)) if same else None)


def _quoted(path: Path, delimiter: str) -> Iterator[tuple[int, list[str]]]:
    """Line number and fields of every row; a field in quotation marks may hold delimiters and ends of lines."""
    allow_long_fields()
    table = csv.reader(readers.lines(path, limit=LONGEST, whole_lines=True), delimiter=delimiter, strict=True)
    try:
        yield from ((table.line_num, values) for values in table if values)
    except csv.Error as error:
        raise InvalidFile(path.name, f"line {table.line_num}: {error}") from error


def _unquoted(path: Path, delimiter: str) -> Iterator[tuple[int, list[str]]]:
    """The rows of a file in which a quotation mark is a character like any other."""
    for number, line in enumerate(readers.lines(path, limit=LONGEST, whole_lines=True), 1):
        if line.strip():
            yield number, line.rstrip("\r\n").split(delimiter)


def _hub_rows(table: TableConfig, setting: str, fields: dict[str, str]) -> Iterator[Row]:
    """Rows of a Hub data set; numbers of classes become their names where it has such, -1 becomes None."""
    assert table.hub is not None
    rows = table.rows(setting)
    _check_fields(fields, rows.column_names, table.hub)
    rows = rows.select_columns(sorted(set(fields.values())))
    names = {column: kind.names for column, kind in rows.features.items() if hasattr(kind, "names")}
    for number, row in enumerate(readers.sound_rows(rows, 0, len(rows)), 1):
        if isinstance(row, InvalidRecord):
            raise SettingError(f"{setting}.hub={table.hub}: {row.name}: {row.reason}; mend or remove that row")
        for column, classes in names.items():
            row[column] = classes[row[column]] if row[column] is not None and row[column] >= 0 else None
        yield Row(f"{table.hub}, row {number}", row)


def _check_fields(fields: dict[str, str], names: list[str], name: str) -> None:
    for setting, field in fields.items():
        if (error := readers.unfit_field(field, names, name, setting)) is not None:
            raise error
