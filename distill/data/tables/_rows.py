"""The rows of tables in CSV, TSV, JSONL, Parquet and text files or on the Hub."""

import glob
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from distill.data import readers
from distill.data.find_files import File, plain_name
from distill.data.readers import Record
from distill.data.tables import LabelledTexts, Split
from distill.runtime.errors import SettingError, StorageFailed, first_line

PLAIN = (".csv", ".tsv", ".jsonl")
SUFFIXES = (*PLAIN, ".parquet")
TEXT_SUFFIXES = (*SUFFIXES, ".txt")  # of examples without labels, which may come as one text a line
KINDS = ("csv", "tsv", "jsonl", "json", "parquet", "txt")
AT_ONCE = 1000  # rows that are decoded together


class Rows(NamedTuple):
    """The rows of one file or data set, as far as they are wanted."""

    name: str  # for messages
    records: list[Record]  # numbers of classes are names here, and -1 is None
    classes: dict[str, tuple[str, ...]]  # the names of the classes that a column numbers


def hub_rows(split: Split, setting: str, fields: dict[str, str]) -> Rows:
    """Those of the data set of a split, which `setting` names. Raises SettingError as `file_rows`."""
    with readable(f"{setting}.hub={split.hub}"):
        return _rows(split.hub_data(setting), str(split.hub), fields)


def file_rows(
    file: File, setting: str, fields: dict[str, str], header: Sequence[str] = (), quotes: bool | None = None
) -> Rows:
    """The rows of a file; of a plain text file each line that is not blank, as the first of the columns.

    Args:
        setting: which names the file.
        fields: the columns that are wanted, by the setting that names each.
        header: the columns of CSV and TSV files whose first line is a row already, and does not name what is wanted.
        quotes: whether fields of CSV and TSV files may be in quotation marks; None: in CSV, not in TSV.

    Raises:
        SettingError: it cannot be read, or lacks a column.
    """
    kind, columns = kind_of(file.place), [*fields.values()]
    if kind not in KINDS:
        raise SettingError(
            f"{setting}={file.place}: its name ends in none of {', '.join(f'*.{each}' for each in KINDS)}"
        )
    if kind == "txt" and len(fields) > 1:
        raise SettingError(
            f"{setting}={file.place}: a plain text file has one text a line, and {' and '.join(columns)} are wanted: "
            "give them as *.csv, *.tsv, *.jsonl or *.parquet"
        )
    with readable(f"{setting}={file.place}"):
        if kind in ("parquet", "json"):
            return _rows(_streamed(kind, file.place), file.name, fields)
        if kind == "txt":
            texts = (line.rstrip("\n") for _, line in readers.lines(file.place))
            return Rows(file.name, [{columns[0]: text} for text in texts if text.strip()], {})
        if kind == "jsonl":
            records = [record for _, record in readers.records(file.place)]
            names = list(dict.fromkeys(name for record in records for name in record))
        else:
            found = readers.table_rows(file.place, fields, quotes=quotes, header=header, short=True)
            records, names = [record for _, record in found], columns
        if not records:
            raise ValueError("it is empty")
        readers.check_columns(fields, names, file.name)
        return Rows(file.name, [{column: record.get(column) for column in columns} for record in records], {})


def kind_of(place: str) -> str:
    """The last suffix of a file's name, that of compression aside: `dev.tsv.gz` -> `tsv`."""
    return plain_name(place).rpartition(".")[2]


def _rows(data: Any, name: str, fields: dict[str, str]) -> Rows:
    """Those of a data set, whose other columns are not decoded. Raises SettingError where a column is not there."""
    if data.column_names is not None:
        readers.check_columns(fields, data.column_names, name)
    data = data.select_columns([*fields.values()])
    kinds = {column: getattr(kind, "names", None) for column, kind in (data.features or {}).items()}
    classes = {column: tuple(names) for column, names in kinds.items() if names}
    records = []
    for batch in data.iter(AT_ONCE):
        for column, names in classes.items():
            batch[column] = [None if index in (None, -1) else names[index] for index in batch[column]]
        records += [dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True)]
    return Rows(name, records, classes)


def _streamed(builder: str, place: str) -> Any:
    """A file as `datasets` reads it, without a copy in its cache."""
    import datasets

    logging.getLogger("datasets.packaged_modules").setLevel(logging.CRITICAL)  # what they log they raise, too
    # JSON in one piece, as the types of the columns of a first piece would have to hold for all others.
    options = {"chunksize": 1 << 30} if builder == "json" else {}
    return datasets.load_dataset(builder, data_files=glob.escape(place), split="train", streaming=True, **options)


@contextmanager
def readable(setting: str) -> Iterator[None]:
    """Turns whatever is raised for a file or data set that cannot be read into one line, which `setting` begins."""
    try:
        yield
    except (SettingError, StorageFailed):
        raise
    except Exception as error:  # of Arrow, of fsspec, of `datasets`, and of our own readers
        own = isinstance(error, readers.InvalidFile) or type(error) is ValueError
        reason = str(error) if own else f"{type(error).__name__}: {first_line(error)}"
        raise SettingError(f"{setting}: {reason}; mend or remove that") from error


def fields_of(setting: str, texts: Sequence[str | None], label: str | None = None) -> dict[str, str]:
    """The columns of one text or two, and of the label, by the setting that names each; `setting` is of the split."""
    columns = [*zip(("text", "second"), texts, strict=False), ("label", label)]
    return {f"{setting}.{name}": column for name, column in columns if column is not None}


def labelled_texts(
    name: str,
    sets: Iterable[Rows],
    fields: dict[str, str],
    parse: Callable[[Any], Any] | None,
    training: bool,
    setting: str,
) -> tuple[LabelledTexts, list[Any]]:
    """The texts of rows, and their labels. Training does without bad rows and counts them; evaluation has to have all.

    Args:
        name: what the examples are called.
        fields: the columns of the texts, and after them that of the label, by the setting that names each.
        parse: the label of a field's content; raises ValueError with the reason where it is none. None: without labels.
        setting: what error lines call the split.

    Raises:
        SettingError: a bad row in evaluation, a column that holds something else than text, or not one row to use.
    """
    columns, labels, texts = [*fields.items()], list[Any](), list[list[str]]()
    left_out, reason = 0, "it is empty"
    for place, record in ((f"{of.name}, row {n}", record) for of in sets for n, record in enumerate(of.records, 1)):
        of_texts = columns if parse is None else columns[:-1]
        try:
            found = [readers.value_of(record, column, key, str) for key, column in of_texts]
            if training and not all(text.strip() for text in found):
                raise ValueError("no text")  # in evaluation a model has to answer all the same
            if parse is not None:
                labels.append(parse(record[columns[-1][1]]))
            texts.append(found)
        except SettingError as error:  # a column holds something else than text
            raise readers.at(place, error) from error
        except ValueError as error:
            if not training:
                raise SettingError(
                    f"{setting}: {place}: {error}; mend that row (every row of an evaluation set counts)"
                ) from error
            left_out, reason = left_out + 1, str(error)
    if not texts:
        raise SettingError(f"{setting}: not one row to use: {reason}; check the file and the columns")
    first, *second = map(list, zip(*texts, strict=True))
    return LabelledTexts(name, first, second[0] if second else None, np.empty(0), (), left_out), labels
