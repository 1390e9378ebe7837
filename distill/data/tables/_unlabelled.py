"""Texts without labels, for a teacher to label: the rows of tables, or the lines of plain text files."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from distill.data import readers
from distill.data.lines import LONGEST, InvalidFile
from distill.data.tables import LabelledTexts, TableConfig, describe
from distill.data.tables._rows import SUFFIXES, Columns, Row, collect, kind_of, read_files
from distill.runtime.errors import SettingError

TEXT_SUFFIXES = (*SUFFIXES, ".txt", ".txt.gz")


def unlabelled_texts(
    files: Sequence[Path], setting: str, columns: Columns, header: tuple[str, ...] = (), quotes: bool | None = None
) -> LabelledTexts:
    """The texts of these files, in their order; rows without text are left out and counted.

    Args:
        setting: which names the files.
        columns: of the texts; of a plain text file every line is a text, where they are no pairs.
        header, quotes: as in `read_rows`.

    Raises:
        SettingError: there are none, or a file cannot be read, lacks a column or holds lines where pairs are wanted.
    """
    collected = collect(_rows(files, setting, columns, header, quotes), columns, str, training=True, setting=setting)
    name = describe(TableConfig(), files)
    return LabelledTexts(name, collected.first, collected.second, np.empty(0), (), collected.left_out)


def _rows(
    files: Sequence[Path], setting: str, columns: Columns, header: tuple[str, ...], quotes: bool | None
) -> Iterator[Row]:
    for path in files:
        if kind_of(path) != "txt":
            yield from read_files([path], setting, columns.fields, header, quotes)
        elif columns.second is None:
            yield from _lines(path, setting, columns.first)
        else:
            raise SettingError(
                f"{setting}={path}: a plain text file has one text a line, and these examples are pairs: give the "
                f"columns {columns.first} and {columns.second} as *.csv, *.tsv, *.jsonl or *.parquet"
            )


def _lines(path: Path, setting: str, column: str) -> Iterator[Row]:
    """The lines of a plain text file, without empty ones."""
    try:
        for number, line in enumerate(readers.lines(path, limit=LONGEST, whole_lines=True), 1):
            if line.strip():
                yield Row(f"{path.name}, line {number}", {column: line.removesuffix("\n")})
    except InvalidFile as error:
        raise SettingError(f"{setting}={path}: {error}; mend or remove that") from error
