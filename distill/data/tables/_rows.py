"""The rows of tables as `datasets` reads them, from files, from the Hub and from memory."""

import glob
import json
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import numpy as np

from distill.data.find_files import File, plain_name
from distill.data.readers import unpack_by_arrow
from distill.data.tables import LabelledTexts, Split
from distill.runtime.errors import SettingError, StorageFailed, did_you_mean, first_line

TABLES = (".csv", ".tsv", ".jsonl", ".parquet")
TEXTS = (*TABLES, ".txt")  # of examples without labels, which may come as one text a line
BUILDERS = {"csv": "csv", "tsv": "csv", "jsonl": "json", "json": "json", "parquet": "parquet", "txt": "text"}
AT_ONCE = 1000  # rows that are decoded together

Record = dict[str, Any]  # a row of the user's, by column
Columns = dict[str, str]  # the columns that are read, by the setting that names each


class Rows(NamedTuple):
    """The rows of one file or data set, as far as they are read."""

    name: str  # for messages
    records: list[Record]  # numbers of classes are names here, and -1 is None
    classes: dict[str, tuple[str, ...]]  # the names of the classes that a column numbers


def columns_of(setting: str, texts: Sequence[str | None], label: str | None = None) -> Columns:
    """The columns of one text or two, and of the label, of a split. Raises SettingError for one that is named twice."""
    names = [*zip(("text", "second"), texts, strict=False), ("label", label)]
    columns = {f"{setting}.{name}": column for name, column in names if column is not None}
    for key, column in columns.items():
        if [*columns.values()].count(column) > 1:
            raise SettingError("named twice", setting=key, value=column, cure="name another column for one of them")
    return columns


def rows_of(
    split: Split,
    files: Sequence[File],
    setting: str,
    columns: Columns,
    header: Sequence[str] = (),
    quotes: bool | None = None,
) -> list[Rows]:
    """Those of files of a split, or without any of the data set that it names.

    Args:
        setting: what error lines call the split.
        header: the columns of CSV and TSV files whose first line is a row already, and does not name what is read.
        quotes: whether fields of CSV and TSV files may be in quotation marks; None: in CSV, not in TSV.

    Raises:
        SettingError: something cannot be read, lacks a column or has no rows.
    """
    if files:
        return [file_rows(file, f"{setting}.path", columns, header, quotes) for file in files]
    return [_rows(split.data_set(setting), str(split.hub), columns)]


def file_rows(
    file: File, setting: str, columns: Columns, header: Sequence[str] = (), quotes: bool | None = None
) -> Rows:
    """The rows of a file, which `setting` names, as `rows_of`; of a plain text file each line that is not blank."""
    kind, names = kind_of(file.place), [*columns.values()]
    with _readable(file, setting):
        if kind not in BUILDERS:
            raise ValueError(f"its name ends in none of {', '.join(f'*.{each}' for each in BUILDERS)}")
        if kind == "txt" and len(columns) > 1:
            raise ValueError(f"one text a line, and {' and '.join(names)} are wanted: give them in another form")
        options: dict[str, Any] = {}
        if kind in ("csv", "tsv"):
            is_quoted = kind == "csv" if quotes is None else quotes
            options = {"sep": "," if kind == "csv" else "\t", "quoting": 0 if is_quoted else 3, "index_col": False}
            options |= {"converters": dict.fromkeys(names, str), "keep_default_na": False, "encoding": "utf-8-sig"}
        elif BUILDERS[kind] == "json":
            options = {"chunksize": 1 << 30}  # at once: the types of the columns of a first chunk hold for all others
        data = _streamed(file, **options)
        if kind == "txt":
            data = data.filter(lambda row: row["text"].strip()).map(lambda row: {names[0]: row["text"]})
        found = _names(data)
        if header and len(found) in (0, len(header)) and not {*names} <= {*found}:
            data = _streamed(file, **options, names=[*header], header=None)
        rows = _rows(data, file.name, columns)
        if not rows.records:
            raise ValueError("it is empty")
        return rows


def kind_of(place: str) -> str:
    """The last ending of a file's name, that of compression aside: `dev.tsv.gz` -> `tsv`."""
    return plain_name(place).rpartition(".")[2]


def _streamed(file: File, **options: Any) -> Any:
    """A file as `datasets` reads it, without a copy in its cache."""
    import datasets

    unpack_by_arrow()
    logging.getLogger("datasets.packaged_modules").setLevel(logging.CRITICAL)  # what they log they raise, too
    place, builder = glob.escape(file.place), BUILDERS[kind_of(file.place)]
    return datasets.load_dataset(builder, data_files=place, split="train", streaming=True, **options)


def _names(data: Any) -> list[str]:
    """The columns of a data set: of a stream those of its first row."""
    return list(data.column_names or next(iter(data), {}))


def _rows(data: Any, name: str, columns: Columns) -> Rows:
    """Those of a data set, whose other columns are not decoded. Raises SettingError where a column is not there."""
    found = _names(data)
    for setting, column in columns.items():
        if found and column not in found:
            problem = f"{name}: no such field{did_you_mean(column, found)}; it has {', '.join(found)}"
            raise SettingError(problem, setting=setting, value=column)
        if f"{column}.1" in found:  # as pandas calls the second one
            raise SettingError(f"{name} has several of this name", setting=setting, value=column, cure="rename one")
    if not found:
        return Rows(name, [], {})
    kinds = {column: getattr(kind, "names", None) for column, kind in (data.features or {}).items()}
    classes = {column: tuple(names) for column, names in kinds.items() if names}
    records: list[Record] = []
    for batch in data.select_columns([*columns.values()]).iter(AT_ONCE):
        for column, names in ((column, classes[column]) for column in batch if column in classes):
            batch[column] = [None if index in (None, -1) else names[index] for index in batch[column]]
        records += [dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True)]
    return Rows(name, records, classes)


@contextmanager
def _readable(file: File, setting: str) -> Iterator[None]:
    """Turns whatever is raised for a file that cannot be read into one line, with the first line that is at fault."""
    from pandas.errors import ParserWarning

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", ParserWarning)  # of rows with more fields than the header
            yield
    except (SettingError, StorageFailed):
        raise
    except Exception as error:  # of Arrow, of pandas, of fsspec, of `datasets`
        reason = "it is empty" if isinstance(error, StopIteration) else first_line(error)
        at = f"line {line:,}: " if (line := _bad_line(file.place)) else ""
        raise SettingError(at + reason, setting=setting, value=file.place, cure="mend or remove that") from error


def _bad_line(place: str) -> int:
    """The number of the first line of a file that is no UTF-8, or no JSON in a file of that; 0: that does not tell."""
    import fsspec

    if kind_of(place) not in ("parquet", "json"):
        with suppress(OSError, EOFError), fsspec.open(place, "rb", compression="infer") as file:
            for number, line in enumerate(file, 1):
                try:
                    if line.decode().strip() and kind_of(place) == "jsonl":
                        json.loads(line)
                except ValueError:
                    return number
    return 0


def labelled_texts(
    name: str, sets: Sequence[Rows], columns: Columns, parse: Callable[[Any], Any] | None, training: bool
) -> tuple[LabelledTexts, list[Any]]:
    """The texts of rows, and their labels. Training does without bad rows and counts them; evaluation has to have all.

    Args:
        name: what the examples are called.
        columns: of the texts, and after them that of the label.
        parse: the label of a field's content; raises ValueError with the reason where it is none. None: without labels.

    Raises:
        SettingError: a bad row in evaluation, a column that holds something else than text, or not one row to use.
    """
    settings = [*columns.items()]
    of_texts = settings if parse is None else settings[:-1]
    split = settings[0][0].rpartition(".")[0]
    labels, texts = list[Any](), list[list[str]]()
    left_out, reason = 0, "it is empty"
    for place, record in ((f"{rows.name}, row {n}", each) for rows in sets for n, each in enumerate(rows.records, 1)):
        found = ["" if record[column] is None else record[column] for _, column in of_texts]
        for (setting, column), text in zip(of_texts, found, strict=True):
            if not isinstance(text, str):
                problem = f"{place}: it holds {type(text).__name__}, not text"
                raise SettingError(problem, setting=setting, value=column)
        try:
            if training and not all(text.strip() for text in found):
                raise ValueError("no text")  # in evaluation a model has to answer all the same
            if parse is not None:
                labels.append(parse(record[settings[-1][1]]))
            texts.append(found)
        except ValueError as error:
            if not training:
                cure = "mend that row (every row of an evaluation set counts)"
                raise SettingError(f"{place}: {error}", setting=split, cure=cure) from error
            left_out, reason = left_out + 1, str(error)
    if not texts:
        raise SettingError(f"not one row to use: {reason}", setting=split, cure="check the file and the columns")
    first, *second = map(list, zip(*texts, strict=True))
    return LabelledTexts(name, first, second[0] if second else None, np.empty(0), (), left_out), labels
