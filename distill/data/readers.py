"""Readers of one file at a path or URL, or of one data set of the Hub, in bounded memory.

What cannot be read ends the run with the file and the line. Plain text and JSONL are entered at any byte and Parquet at
any row group, so that processes and hosts share a large file without a copy of it on each of them.
"""

import csv
import io
import json
import lzma
import re
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import IO, Any

from distill.data.find_files import COMPRESSED, file_name, plain_name
from distill.data.remote import file_system, is_url, is_web, may_pass
from distill.runtime.errors import SettingError, StorageFailed, did_you_mean, first_line
from distill.runtime.hub import how_to_do_without, is_hub_reached, is_unreachable

Record = dict[str, Any]  # of the user's data: what its fields hold, by the names that they have there
Numbered = Iterator[tuple[int, Record]]  # records, each with the number of its line or row from 1 on
Columns = Callable[[list[str]], dict[str, str]]  # of the columns of a file those that are read, by setting

PIECE = 1 << 20  # characters after which a plain text file is cut at the next blank line
LONGEST = 16 << 20  # bytes of one document that are held in memory
ROWS = 64  # of a Parquet file, at once
BUFFER = 1 << 20  # bytes of a Parquet column that are read at once
UNREADABLE = (OSError, EOFError, zlib.error, lzma.LZMAError)  # what reading raises of a file that is damaged, or cut
WHOLE = re.compile("range requests|seek streaming")  # in what fsspec raises for web servers that send no parts


class InvalidFile(Exception):
    """A file that cannot be used: its name, with the place in it, and the reason in a few words."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(name, reason)
        self.name, self.reason = name, " ".join(reason.split())

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}"


# --- plain files


def is_compressed(place: str) -> bool:
    """Whether a file is unpacked as it is read, by its name; such a file cannot be entered in the middle."""
    return plain_name(place) != file_name(place).lower()


@contextmanager
def opened(place: str, unpack: bool = True) -> Iterator[IO[bytes]]:
    """The content of the file at a path or URL, unpacked where its name ends like that of a compressed file.

    Raises:
        InvalidFile: it cannot be read (further).
        StorageFailed: likewise, of one at a URL.
    """
    from fsspec.core import OpenFile

    unpack_by_arrow()
    system, path = file_system(place, "corpus.path")
    compression = COMPRESSED.get(Path(file_name(place).lower()).suffix) if unpack else None
    try:
        with OpenFile(system, path, "rb", compression) as file:
            # A file of fsspec takes each line out of a block of megabytes.
            yield io.BufferedReader(file, BUFFER) if unpack and is_url(place) and compression is None else file
    except (InvalidFile, SettingError, StorageFailed):
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {first_line(error)}"
        if is_web(place) and isinstance(error, ValueError) and WHOLE.search(str(error)):
            raise InvalidFile(file_name(place), f"its server sends whole files only ({reason})") from error
        if is_url(place) and may_pass(error):
            raise StorageFailed(f"{place} could not be read further ({reason})") from error
        if isinstance(error, UNREADABLE):
            raise InvalidFile(file_name(place), reason) from error
        raise


def unpack_by_arrow() -> None:
    """Let fsspec unpack zstd and lz4 by Arrow: what their own packages give, where these are there, has no lines."""
    from fsspec.compression import register_compression

    for name, ending in (("zstd", "zst"), ("lz4", "lz4")):
        register_compression(name, partial(_unpacked, name), ending, force=True)


def _unpacked(compression: str, file: IO[bytes], mode: str = "rb", **_: Any) -> Any:
    import pyarrow

    return io.BufferedReader(pyarrow.CompressedInputStream(pyarrow.PythonFile(file, "r"), compression))


# How compressed files begin, and the end of the name by which they are known.
MAGIC = {
    b"\x1f\x8b": ".gz",
    b"\x28\xb5\x2f\xfd": ".zst",
    b"BZh": ".bz2",
    b"\xfd7zXZ": ".xz",
    b"\x04\x22\x4d\x18": ".lz4",
}


def lines(
    place: str, start: int = 0, stop: int | None = None, encoding: str | None = None
) -> Iterator[tuple[int, str]]:
    """The lines of a file that begin in bytes [start, stop), with their ends, each with its number from there.

    Args:
        encoding: in which the end of a line is the byte 10, as in all but UTF-16 and UTF-32; None: UTF-8.

    Raises:
        InvalidFile: a line is not in this encoding, or the file cannot be read.
    """
    with opened(place) as file:
        if start:  # the line that crosses `start` belongs to the range before
            file.seek(start - 1)
            start += len(file.readline()) - 1
        at = start
        for number, raw in enumerate(file, 1):
            if stop is not None and at >= stop:
                return
            try:
                line = raw.decode(encoding or "utf-8")
            except UnicodeDecodeError as error:
                compressed = [ending for magic, ending in MAGIC.items() if raw.startswith(magic) and at == 0]
                name = "UTF-8" if encoding is None else encoding
                reason = f"compressed, so its name has to end in {compressed[0]}" if compressed else error.reason
                raise InvalidFile(line_name(place, start, number), f"not {name} ({reason})") from error
            yield number, (line if at else line.removeprefix("\ufeff")).replace("\r\n", "\n")
            at += len(raw)


def line_name(place: str, start: int, number: int) -> str:
    """What error lines call the line of this number among those that begin from byte `start` of a file on."""
    left = start - 1
    number += start > 0  # the end of the line that crosses `start`
    with opened(place) as file:
        while left > 0 and (part := file.read(min(left, 1 << 20))):
            number, left = number + part.count(b"\n"), left - len(part)
    return f"{file_name(place)}, line {number:,}"


def check_encoding(encoding: str | None, setting: str) -> None:
    """Raises SettingError where files cannot be read in this encoding; `setting` names their source."""
    try:
        if "\n".encode(encoding or "utf-8") in (b"\n", b"\xef\xbb\xbf\n"):
            return
        cure = f"convert the files to UTF-8, as with `iconv -f {encoding} -t UTF-8`"
        problem = "it does not end lines with one byte 10"
    except (LookupError, UnicodeError):
        problem, cure = "no encoding of Python", "write gb18030, cp1252, shift_jis ..."
    raise SettingError(problem, setting=f"{setting}.encoding", value=encoding, cure=cure)


def pieces(place: str, start: int = 0, stop: int | None = None, encoding: str | None = None) -> Iterator[str]:
    """Consecutive texts of about 1 MiB of a plain text file, cut at blank lines where it has any.

    `start` and `stop` are byte offsets: the lines that begin in [start, stop) are read.
    """
    return _joined(
        lines(place, start, stop, encoding),
        lambda line, size: size >= PIECE and (not line.strip() or size >= 2 * PIECE),
    )


def paragraphs(place: str, start: int = 0, stop: int | None = None, encoding: str | None = None) -> Iterator[str]:
    """What stands between two blank lines of a plain text file; `start` and `stop` as in `pieces`."""
    return _joined(lines(place, start, stop, encoding), lambda line, size: not line.strip())


def whole(place: str, encoding: str | None = None) -> str:
    """The text of a plain text file."""
    return next(_joined(lines(place, encoding=encoding), lambda line, size: False), "")


def _joined(found: Iterator[tuple[int, str]], ends: Callable[[str, int], bool]) -> Iterator[str]:
    """Lines put together, up to one after which a text `ends`: a function of the line and the characters so far."""
    text: list[str] = []
    size = 0
    for _, line in found:
        text.append(line)
        size += len(line)
        if ends(line, size):
            yield without_blank_ends("".join(text))
            text, size = [], 0
    yield without_blank_ends("".join(text))


def without_blank_ends(text: str) -> str:
    """`text` without blank lines, and the end of a line, at its ends; the blanks in front of code stay."""
    end = text.rstrip()
    begin = text.rfind("\n", 0, len(text) - len(text.lstrip())) + 1 if end else 0
    return (end + text[len(end) :].partition("\n")[0])[begin:] if end else ""


_BLANK = re.compile(r"\s")


def blocks(text: str, size: int) -> Iterator[str]:
    """`text` in stretches of whole paragraphs of `size` to 2 `size` characters; put together they are the text.

    A paragraph longer than that is cut between two words, or after 4 `size` characters where it has no blank.
    """
    begin = 0
    while begin < len(text):
        cut = text.find("\n\n", begin + size, begin + 2 * size)
        blank = _BLANK.search(text, begin + 2 * size, begin + 4 * size) if cut < 0 else None
        end = cut + 2 if cut >= 0 else blank.end() if blank else begin + 4 * size
        yield text[begin:end]
        begin = end


# --- records


def records(place: str, start: int = 0, stop: int | None = None, encoding: str | None = None) -> Numbered:
    """Every JSON object of a JSONL file, with the number of its line; `start` and `stop` as in `pieces`.

    Raises:
        InvalidFile: a line is no JSON object.
    """
    for number, line in lines(place, start, stop, encoding):
        if line.strip():
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise InvalidFile(line_name(place, start, number), f"not JSON ({first_line(error)})") from error
            if not isinstance(record, dict):
                raise InvalidFile(line_name(place, start, number), "no JSON object")
            if ("\\ud" in line or "\\uD" in line) and not has_utf8(json.dumps(record, ensure_ascii=False)):
                raise InvalidFile(line_name(place, start, number), "half a surrogate pair in it")
            yield number, record


def table_rows(place: str, fields: Columns, encoding: str | None = None) -> Numbered:
    """The rows of a CSV or TSV file as records of texts by the names of its header, each with the number of its line.

    Args:
        fields: gives of the columns that are there those that are wanted, by the setting that names each. In CSV, and
            not in TSV, a field in quotation marks may hold separators and ends of lines.

    Raises:
        SettingError: a wanted column is not there.
        InvalidFile: a row has another number of fields than the first one, or ends within quotation marks.
    """
    csv.field_size_limit(sys.maxsize)  # Python's own limit is 131,072 characters
    is_tsv = plain_name(place).endswith(".tsv")
    quoting = csv.QUOTE_NONE if is_tsv else csv.QUOTE_MINIMAL
    names: list[str] = []
    text = (line for _, line in lines(place, encoding=encoding))
    rows = csv.reader(text, delimiter="\t" if is_tsv else ",", quoting=quoting, strict=True)  # type: ignore[arg-type]
    try:
        for row in filter(None, rows):
            if not names:
                names = [name.strip() for name in row]
                check_columns(fields(names), names, file_name(place))
                continue
            if len(row) != len(names):
                raise csv.Error(f"{len(row)} fields, not the {len(names)} of its header")
            yield rows.line_num, dict(zip(names, row, strict=True))
    except csv.Error as error:
        raise InvalidFile(f"{file_name(place)}, line {rows.line_num:,}", str(error)) from error


def parquet_rows(place: str, fields: Columns, start: int = 0, stop: int | None = None) -> Numbered:
    """Columns of the row groups [start, stop) of a Parquet file, with the numbers of rows from 1 on.

    Args:
        fields: gives of the columns that are there those that are wanted, by the setting that names each.

    Raises:
        SettingError: a wanted column is not there.
        InvalidFile: it cannot be read.
    """
    with _parquet(place) as file:
        names = [str(name) for name in file.schema_arrow.names]
        wanted = fields(names)
        check_columns(wanted, names, file_name(place))
        groups = range(start, file.num_row_groups if stop is None else stop)
        number = sum(file.metadata.row_group(group).num_rows for group in range(start))
        for batch in file.iter_batches(ROWS, row_groups=groups, columns=[*wanted.values()]):
            for row in batch.to_pylist():
                number += 1
                yield number, row


def num_row_groups(place: str) -> int:
    """The row groups of a Parquet file."""
    with _parquet(place) as file:
        return int(file.num_row_groups)


@contextmanager
def _parquet(place: str) -> Iterator[Any]:
    import pyarrow
    import pyarrow.parquet

    try:
        # With a buffer a row group is read page by page, not all at once.
        with opened(place, unpack=False) as file, pyarrow.parquet.ParquetFile(file, buffer_size=BUFFER) as table:
            yield table
    except (pyarrow.ArrowException, UnicodeDecodeError) as error:
        raise InvalidFile(file_name(place), f"{type(error).__name__}: {first_line(error)}") from error


# --- the Hub


def load_hub(hub: str, subset: str | None, split: str, streaming: bool, setting: str) -> Any:
    """A Hub data set (or a local folder that `datasets` reads).

    Raises:
        SettingError: it cannot be had; the reason is in the line.
    """
    import datasets

    datasets.disable_progress_bars()
    is_cached_alone = not Path(hub).expanduser().exists() and not is_hub_reached()
    try:
        if is_saved(hub):
            return _load_saved(hub, split)
        with _without_requests() if is_cached_alone else nullcontext():
            return datasets.load_dataset(hub, subset, split=split, streaming=streaming)
    except Exception as error:  # `datasets` raises a dozen kinds for a wrong name, a wrong split and no network
        reason = " ".join(str(error).split())[:300]
        cure = f"check the names and the network, or give a local copy as {setting}.path"
        line = how_to_do_without(hub, "dataset") if is_unreachable(error) else f"{reason}; {cure}"
        raise SettingError(f"{setting}.hub={hub} (subset={subset}, split={split}) cannot be loaded: {line}") from error


@contextmanager
def _without_requests() -> Iterator[None]:
    """While it is open `datasets` looks into its cache alone, as under HF_HUB_OFFLINE=1."""
    import datasets

    before = datasets.config.HF_HUB_OFFLINE
    datasets.config.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        datasets.config.HF_HUB_OFFLINE = before


def numbered_rows(rows: Any, what: str, start: int = 0) -> Numbered:
    """The rows of a data set, which `what` names, each with its number, of which the first is behind `start`.

    Raises:
        InvalidFile: a row cannot be read.
        StorageFailed: the network fails.
    """
    number = start
    try:
        for number, row in enumerate(rows, start + 1):
            yield number, row
    except ValueError as error:  # of UTF-8, of Arrow, and of types that change on the way
        raise InvalidFile(f"{what}, behind row {number:,}", f"{type(error).__name__}: {first_line(error)}") from error
    except Exception as error:  # of whichever client `datasets` uses, after its own tries
        raise StorageFailed(
            f"{what} could not be read further ({type(error).__name__}: {first_line(error)})"
        ) from error


def is_saved(folder: str) -> bool:
    """Whether `save_to_disk` of `datasets` wrote this folder."""
    path = Path(folder).expanduser()
    return (path / "dataset_dict.json").is_file() or all(
        (path / name).is_file() for name in ("state.json", "dataset_info.json")
    )


def _load_saved(folder: str, split: str) -> Any:
    """The split of a data set that `save_to_disk` wrote; one that was saved alone is all there is of it."""
    import datasets

    saved = datasets.load_from_disk(str(Path(folder).expanduser()))
    if not isinstance(saved, datasets.DatasetDict):
        return saved
    if split not in saved:
        raise ValueError(f"it has no such split; it has {', '.join(saved)}")
    return saved[split]


def hub_revision(hub: str) -> str:
    """The commit of a data set on the Hub; its name where it is a local folder or the Hub cannot be reached."""
    from huggingface_hub import HfApi

    if not is_hub_reached():
        return hub
    try:
        return str(HfApi().dataset_info(hub, timeout=10).sha)
    except Exception:  # any answer but the commit leaves the name
        return hub


def has_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def text_in(record: Record, field: str, setting: str) -> str:
    """A field of a record, which has to be text; "" where it is null.

    Args:
        setting: which names the field, such as `corpus.field`.

    Raises:
        SettingError: there is no such field, or it holds something else.
    """
    if field not in record:
        raise no_field(field, list(record), setting)
    value = "" if record[field] is None else record[field]
    if not isinstance(value, str):
        raise SettingError(f"it holds {type(value).__name__}, not text", setting=setting, value=field)
    return value


def check_columns(fields: dict[str, str], names: list[str], name: str) -> None:
    """Raises SettingError where a wanted column is none of these of the file of this name, or there twice.

    Args:
        fields: the columns that are wanted, by the setting that names each.
    """
    for setting, field in fields.items():
        if field not in names:
            raise at(name, no_field(field, names, setting))
        if (count := names.count(field)) > 1:
            problem = f"{name} has {count} columns of this name, and which is meant is not known"
            raise SettingError(problem, setting=setting, value=field, cure="rename or remove the others")


def at(place: str, error: SettingError) -> SettingError:
    """The same error with the place at which it stands."""
    if not error.setting:
        return SettingError(f"{error.problem} ({place})")
    return SettingError(f"{place}: {error.problem}", setting=error.setting, value=error.value, cure=error.cure)


def no_field(field: str, fields: list[str], setting: str) -> SettingError:
    """For a record or file that lacks a field; `fields` are those that it has."""
    near = did_you_mean(field, map(str, fields))
    problem = f"no such field{near}; it has {', '.join(map(str, fields)) or 'none'}"
    return SettingError(problem, setting=setting, value=field)
