"""Readers of one file, or one Hub data set, that give its texts in bounded memory."""

import codecs
import gzip
import json
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, TypeVar

from distill.errors import SettingError

Value = TypeVar("Value", str, list)

PIECE = 1 << 20  # characters after which a plain text file is cut at the next blank line


class Unreadable(Exception):
    """A file that cannot be used: its name, and the reason in a few words."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(name, reason)
        self.name, self.reason = name, " ".join(reason.split())

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}"


def pieces(path: Path, start: int = 0, stop: int | None = None) -> Iterator[str]:
    """Consecutive texts of about 1 MiB of a plain text file, cut at blank lines where it has any.

    `start` and `stop` are byte offsets: the lines that begin in [start, stop) are read.
    """
    piece: list[str] = []
    size = 0
    for line in lines(path, start, stop, limit=PIECE):
        piece.append(line)
        size += len(line)
        if size >= PIECE and (not line.strip() or size >= 2 * PIECE):
            yield "".join(piece).strip()
            piece, size = [], 0
    yield "".join(piece).strip()


def paragraphs(path: Path, start: int = 0, stop: int | None = None) -> Iterator[str]:
    """What stands between two blank lines of a plain text file; `start` and `stop` as in `pieces`."""
    paragraph: list[str] = []
    for line in lines(path, start, stop):
        if line.strip():
            paragraph.append(line)
        elif paragraph:
            yield "".join(paragraph).strip()
            paragraph = []
    yield "".join(paragraph).strip()


_BLANK = re.compile(r"\s")


def blocks(text: str, size: int) -> Iterator[str]:
    """`text` in stretches of whole paragraphs of `size` to 2 `size` characters; put together they are the text.

    A paragraph longer than that is cut between two words.
    """
    begin = 0
    while begin < len(text):
        cut = text.find("\n\n", begin + size, begin + 2 * size)
        blank = _BLANK.search(text, begin + 2 * size) if cut < 0 else None
        end = cut + 2 if cut >= 0 else blank.end() if blank else len(text)
        yield text[begin:end]
        begin = end


def records(path: Path, start: int = 0, stop: int | None = None) -> Iterator[dict[str, Any]]:
    """Every JSON object of a JSONL file; `start` and `stop` as in `pieces`.

    Raises:
        Unreadable: a line is no JSON object.
    """
    for number, line in enumerate(lines(path, start, stop), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError as error:
            raise Unreadable(path.name, f"line {number} is not JSON ({error})") from error
        if not isinstance(record, dict):
            raise Unreadable(path.name, f"line {number} is no JSON object")
        yield record


def columns(path: Path, fields: dict[str, str], start: int = 0, stop: int | None = None) -> Iterator[dict[str, Any]]:
    """Columns of the row groups [start, stop) of a Parquet file, row by row, 256 of which are in memory.

    Args:
        fields: the columns by the setting that names each, such as {"corpus.field": "text"}.

    Raises:
        SettingError: there is no such column.
    """
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for setting, field in fields.items():
                if field not in file.schema_arrow.names:
                    raise no_field(field, file.schema_arrow.names, path.name, setting)
            groups = range(start, file.num_row_groups if stop is None else stop)
            for batch in file.iter_batches(256, row_groups=groups, columns=list(fields.values())):
                yield from batch.to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise Unreadable(path.name, f"{type(error).__name__}: {error}") from error


def num_row_groups(path: Path) -> int:
    """Of a Parquet file; 1 where it cannot be read, so that the reader says what is wrong with it."""
    import pyarrow
    import pyarrow.parquet

    try:
        return int(pyarrow.parquet.ParquetFile(path).num_row_groups)
    except (pyarrow.ArrowException, OSError):
        return 1


def load_hub(hub: str, subset: str | None, split: str, streaming: bool, setting: str) -> Any:
    """A Hub data set (or a local folder that `datasets` reads).

    Raises:
        SettingError: it cannot be had; the reason is in the line.
    """
    import datasets

    datasets.disable_progress_bars()
    try:
        return datasets.load_dataset(hub, subset, split=split, streaming=streaming)
    except Exception as error:  # `datasets` raises a dozen kinds for a wrong name, a wrong split and no network
        reason = " ".join(str(error).split())[:300]
        raise SettingError(
            f"{setting}.hub={hub} (subset={subset}, split={split}) cannot be loaded: {reason}; check the names and the "
            f"network, or give a local copy as {setting}.path"
        ) from error


def hub_revision(hub: str) -> str:
    """The commit of a data set on the Hub; its name where it is a local folder or the Hub cannot be reached."""
    from huggingface_hub import HfApi

    try:
        return str(HfApi().dataset_info(hub, timeout=10).sha)
    except Exception:  # any answer but the commit leaves the name
        return hub


def value_of(record: dict[str, Any], field: str, name: str, setting: str, kind: type[Value]) -> Value:
    """A field of a record, which has to be of this kind; nothing of it where it is null.

    Args:
        name: of the file or data set.
        setting: which names the field, such as `corpus.field`.

    Raises:
        SettingError: there is no such field, or it holds something else.
    """
    if field not in record:
        raise no_field(field, list(record), name, setting)
    value = record[field]
    if value is None:
        return kind()
    if not isinstance(value, kind):
        wanted = "text" if kind is str else f"a {kind.__name__}"
        raise SettingError(f"{setting}={field}: in {name} it holds {type(value).__name__}, not {wanted}")
    return value


def no_field(field: str, fields: list[str], name: str, setting: str) -> SettingError:
    """For a record or file of this name that lacks a field; `fields` are those that it has."""
    return SettingError(f"{setting}={field}: {name} has no such field; it has {', '.join(map(str, fields))}")


def lines(path: Path, start: int = 0, stop: int | None = None, limit: int = -1) -> Iterator[str]:
    """The lines of a UTF-8 file, plain or gzip, that begin in bytes [start, stop); one over `limit` bytes comes in
    parts.

    Raises:
        Unreadable: damaged, or not UTF-8.
    """
    decoder = codecs.getincrementaldecoder("utf-8")()
    at = start
    try:
        with _open(path) as file:
            if start:  # the line that crosses `start` belongs to the part before
                file.seek(start - 1)
                at = start - 1 + len(file.readline())
            while stop is None or at < stop:
                raw = file.readline(limit)
                if not raw:
                    decoder.decode(b"", final=True)
                    return
                line = decoder.decode(raw)
                if at == 0:
                    line = line.removeprefix("\ufeff")
                if "\0" in line:
                    raise Unreadable(path.name, "not text (it has zero bytes)")
                at += len(raw)
                yield line.replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise Unreadable(path.name, f"not UTF-8 near byte {at:,} ({error.reason})") from error
    except (OSError, EOFError, zlib.error) as error:
        raise Unreadable(path.name, f"{type(error).__name__}: {error}") from error


def _open(path: Path) -> IO[bytes]:
    return gzip.open(path, "rb") if path.name.endswith(".gz") else path.open("rb")  # type: ignore[return-value]
