"""Inputs of predictions from files and pipes, and their outcomes as files: JSON lines, tables, plain text, SQuAD."""

import json
import sys
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

from distill.commands.prediction.tables import KINDS, Columns, write_table
from distill.data import readers
from distill.data.lines import LONGEST, InvalidFile, Record
from distill.data.tables._rows import kind_of, read_files
from distill.models.load import model_folder
from distill.runtime.errors import SettingError, first_line
from distill.runtime.files import atomic

Place = tuple[str, Any]  # where an input stands, for messages, and the input: a text or an object


def read_inputs(
    path: str, columns: tuple[str, ...], instead: tuple[str, ...] = (), quotes: bool | None = None
) -> Iterator[Place]:
    """The inputs of a file: JSON lines, CSV or TSV with a header, Parquet, plain text of one a line, or SQuAD's JSON.

    Args:
        columns: of a Parquet file, those that are read; of other files all are.
        instead: a column that stands for all of these, the first that there is where one of them is missing.
        quotes: whether fields of CSV and TSV files may be in quotation marks; None: in CSV, not in TSV.

    Raises:
        SettingError: it cannot be read, or lacks a column; the message names `input`.
    """
    file = Path(path).expanduser()
    if not file.is_file():
        raise SettingError(f"input={path}: no such file; correct the path")
    kind = kind_of(file)
    try:
        if kind == "json":
            yield from _of_squad(file)
        elif kind == "jsonl":
            yield from _of_lines(readers.lines(file, limit=LONGEST, whole_lines=True), file.name, json_lines=True)
        elif kind in ("csv", "tsv", "parquet"):
            fields = _fields(path, file, columns, instead) if kind == "parquet" else {}
            for row in read_files([file], "input", fields, quotes=quotes):
                if row.values is None:
                    raise SettingError(f"input={path}: {row.place} has another number of fields than the header")
                yield row.place, {name: value for name, value in row.values.items() if value is not None}
        elif kind == "txt":
            yield from _of_lines(readers.lines(file, limit=LONGEST, whole_lines=True), file.name, json_lines=False)
        else:
            raise SettingError(f"input={path}: unknown file type; give *.jsonl, *.csv, *.tsv, *.parquet, *.txt")
    except InvalidFile as error:
        raise SettingError(f"input={path}: {error}; correct or remove it") from error


def _fields(path: str, file: Path, columns: tuple[str, ...], instead: tuple[str, ...]) -> dict[str, str]:
    names = readers.column_names(file)
    if not set(columns) <= set(names) and (other := next((name for name in instead if name in names), None)):
        columns = (other,)
    return {f"input={path}: {name}": name for name in columns}


def read_pipe(stream: IO[str]) -> Iterator[Place]:
    """The inputs of standard input: JSON lines where the first line begins as an object does, else a text a line.

    A first line in quotation marks is JSON as well, unless it goes on behind them, as dialogue does.
    """
    lines, read = _decoded(stream), list[str]()
    for line in lines:
        read.append(line)
        if line.strip():
            break
    first = read[-1] if read else ""
    yield from _of_lines(chain(read, lines), "standard input", first.lstrip().startswith("{") or _is_json_text(first))


def _is_json_text(line: str) -> bool:
    try:
        return isinstance(json.loads(line), str)
    except ValueError:
        return False


def _decoded(stream: IO[str]) -> Iterator[str]:
    """The lines of a pipe. Raises SettingError where they are not UTF-8."""
    try:
        yield from stream
    except UnicodeDecodeError as error:
        raise SettingError(
            f"standard input is not {error.encoding} ({error.reason}): convert it to UTF-8, such as with iconv"
        ) from None


def _of_lines(lines: Iterable[str], name: str, json_lines: bool) -> Iterator[Place]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        place = f"{name}, line {number}"
        if not json_lines:
            yield place, line.rstrip("\r\n")
            continue
        try:
            yield place, json.loads(line)
        except (ValueError, RecursionError) as error:
            raise SettingError(f"{place} is not JSON ({first_line(error)}); correct that line") from None


def _of_squad(file: Path) -> Iterator[Place]:
    """The questions of SQuAD's own JSON, data > paragraphs > qas, with their ids."""
    try:
        articles = json.loads("".join(readers.lines(file)))["data"]
        for article in articles:
            for paragraph in article["paragraphs"]:
                for question in paragraph["qas"]:
                    record = {"id": question["id"], "question": question["question"], "context": paragraph["context"]}
                    yield f"{file.name}, question {record['id']}", record
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise SettingError(
            f"input={file}: not in SQuAD's form, data > paragraphs > qas ({type(error).__name__}: {first_line(error)})"
            "; give one object a line as *.jsonl"
        ) from None


def files_read(model: str, inputs: Iterable[Path]) -> list[Path]:
    """The files that no output may replace: the inputs, and those of the model where it is in a folder."""
    folder = Path(model_folder(model))
    return [*inputs, *(folder.iterdir() if folder.is_dir() else [])]


def write_outcomes(outcomes: Iterable[Record], path: str | None) -> int:
    """Write outcomes as JSON lines, to standard output as they come, or to a file that appears once it is whole.

    A file called *.csv, *.tsv or *.parquet becomes a table. Into a file called *.json goes SQuAD's form of predictions,
    the answer by the question's id.

    Returns:
        How many there were.

    Raises:
        SettingError: the file cannot be written, or an outcome lacks the id that it needs.
    """
    if path is None:
        return _write_lines(outcomes, sys.stdout)
    file = Path(path).expanduser()
    if file.is_dir() or not file.absolute().parent.is_dir():
        raise SettingError(f"output={path}: give a file in an existing folder")
    try:
        with atomic(file) as new:
            if (kind := kind_of(file)) in KINDS:
                return _write_table(outcomes, kind, new)
            with new.open("w", encoding="utf-8") as stream:
                return _write_answers(outcomes, stream) if kind == "json" else _write_lines(outcomes, stream)
    except FileNotFoundError:
        raise SettingError(f"output={path}: no file can be made there; give another") from None


def _write_lines(outcomes: Iterable[Record], stream: IO[str]) -> int:
    count = 0
    for outcome in outcomes:
        stream.write(json.dumps(outcome, ensure_ascii=False, default=str) + "\n")
        stream.flush()
        count += 1
    return count


def _write_table(outcomes: Iterable[Record], kind: str, path: Path) -> int:
    """They are kept as JSON lines until all columns are known: the last one may have an entry that no other has."""
    columns = Columns()

    def seen() -> Iterator[Record]:
        for outcome in outcomes:
            columns.add(outcome)
            yield outcome

    with TemporaryFile("w+", encoding="utf-8", dir=path.parent) as lines:
        count = _write_lines(seen(), lines)
        lines.seek(0)
        write_table(map(json.loads, lines), columns, kind, path)
    return count


def _write_answers(outcomes: Iterable[Record], stream: IO[str]) -> int:
    answers: dict[str, str] = {}
    for number, outcome in enumerate(outcomes, 1):
        if "id" not in outcome or "answer" not in outcome:
            raise SettingError(
                f"output=*.json has an answer for every question id, and input {number} lacks one of the two: give "
                "output=FILE.jsonl"
            )
        answers[str(outcome["id"])] = outcome["answer"]
    json.dump(answers, stream, ensure_ascii=False, indent=1)
    return len(answers)
