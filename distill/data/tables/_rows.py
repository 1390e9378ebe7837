"""The rows of tables in CSV, TSV, JSONL, Parquet and text files or on the Hub, as `datasets` reads them."""

import csv
import glob
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from distill.data import readers
from distill.data.lines import LONGEST, InvalidFile, Record, lines, plain_name
from distill.data.tables import LabelledTexts, Split
from distill.runtime.errors import SettingError, first_line

PLAIN = (".csv", ".tsv", ".jsonl")
SUFFIXES = (*PLAIN, *(f"{suffix}.gz" for suffix in PLAIN), ".parquet")
TEXT_SUFFIXES = (*SUFFIXES, ".txt", ".txt.gz")  # of examples without labels, which may come as one text a line
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
    path: Path, setting: str, fields: dict[str, str], header: Sequence[str] = (), quotes: bool | None = None
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
    kind = kind_of(path)
    if kind not in KINDS:
        raise SettingError(f"{setting}={path}: its name ends in none of {', '.join(f'*.{each}' for each in KINDS)}")
    if kind == "txt" and len(fields) > 1:
        raise SettingError(
            f"{setting}={path}: a plain text file has one text a line, and {' and '.join(fields.values())} are wanted: "
            "give them as *.csv, *.tsv, *.jsonl or *.parquet"
        )
    with readable(f"{setting}={path}", path):
        if kind == "txt":
            (column,) = fields.values()
            texts = [row["text"] for row in _streamed("text", path)]
            return Rows(path.name, [{column: text} for text in texts if text.strip()], {})
        if kind in ("csv", "tsv"):
            data = _separated(path, kind == "csv", quotes, fields, header)
        else:
            # In one piece, as the types of the columns of a first piece would have to hold for all others.
            data = _streamed("parquet", path) if kind == "parquet" else _streamed("json", path, chunksize=1 << 30)
        return _rows(data, path.name, fields)


def kind_of(path: Path) -> str:
    """The last suffix of a file's name, that of compression aside: `dev.tsv.gz` -> `tsv`."""
    return plain_name(path.name).rpartition(".")[2]


def _rows(data: Any, name: str, fields: dict[str, str]) -> Rows:
    """Those of a data set, whose other columns are not decoded. Raises SettingError where a column is not there."""
    if data.column_names is not None:
        _check(fields, data.column_names, name)
    data = data.select_columns([*fields.values()])
    kinds = {column: getattr(kind, "names", None) for column, kind in (data.features or {}).items()}
    classes = {column: tuple(names) for column, names in kinds.items() if names}
    records = []
    for batch in data.iter(AT_ONCE):
        for column, names in classes.items():
            batch[column] = [None if index in (None, -1) else names[index] for index in batch[column]]
        records += [dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True)]
    return Rows(name, records, classes)


def _check(fields: dict[str, str], names: list[str], name: str) -> None:
    """Raises SettingError where a wanted column is not there, or there twice."""
    for setting, column in fields.items():
        if (error := readers.unfit_field(column, names, name, setting)) is not None:
            raise error


def _separated(path: Path, has_commas: bool, quotes: bool | None, fields: dict[str, str], header: Sequence[str]) -> Any:
    """A CSV or TSV file, all of it text. Its header is read as a row: so a longer row is an error, and no index."""
    import datasets

    is_quoted = has_commas if quotes is None else quotes
    options: dict[str, Any] = {
        "sep": "," if has_commas else "\t",
        "quoting": csv.QUOTE_MINIMAL if is_quoted else csv.QUOTE_NONE,
    }
    options |= {"header": None, "keep_default_na": False}
    names = [str(name).strip() for name in next(iter(_streamed("csv", path, nrows=1, **options))).values()]
    has_header = {*fields.values()} <= {*names} or len(names) != len(header)
    names = names if has_header else [*header]
    _check(fields, names, path.name)
    names = [name if names.count(name) == 1 else f"{name} {number}" for number, name in enumerate(names)]
    features = datasets.Features({name: datasets.Value("string") for name in names})
    rows = _streamed("csv", path, names=names, features=features, **options)
    return rows.skip(1) if has_header else rows


def _streamed(builder: str, path: Path, **options: Any) -> Any:
    """A file as `datasets` reads it, without a copy in its cache."""
    import datasets

    logging.getLogger("datasets.packaged_modules").setLevel(logging.CRITICAL)  # what they log they raise, too
    files = glob.escape(str(path))
    return datasets.load_dataset(builder, data_files=files, split="train", streaming=True, **options)


@contextmanager
def readable(setting: str, path: Path | None = None) -> Iterator[None]:
    """Turns whatever `datasets` raises for a file or data set into one line, which `setting` begins."""
    try:
        yield
    except SettingError:
        raise
    except StopIteration as error:
        raise SettingError(f"{setting}: it is empty; mend or remove that") from error
    except Exception as error:  # of pandas, of Arrow, of fsspec, and of `datasets` itself
        reason = (path and _malformed_line(path)) or f"{type(error).__name__}: {first_line(error)}"
        raise SettingError(f"{setting}: {reason}; mend or remove that") from error


def _malformed_line(path: Path) -> str | None:
    """The first line of a file that is not UTF-8, or no JSON: Arrow counts lines from the last 10 MiB on."""
    number, kind = 0, kind_of(path)
    try:
        for line in lines(path, LONGEST, whole_lines=True) if kind != "parquet" else ():
            number += 1
            if kind == "jsonl" and line.strip():
                json.dumps(json.loads(line), ensure_ascii=False).encode()
    except InvalidFile as error:
        return str(error)
    except (ValueError, RecursionError) as error:
        return f"{path.name}, line {number}: not JSON ({error})"
    return None


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
        found = [readers.value_of(record, column, place, key, str) for key, column in of_texts]
        try:
            if training and not all(text.strip() for text in found):
                raise ValueError("no text")  # in evaluation a model has to answer all the same
            if parse is not None:
                labels.append(parse(record[columns[-1][1]]))
            texts.append(found)
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
