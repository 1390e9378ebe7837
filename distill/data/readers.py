"""Readers of one file, or one Hub data set, that give its texts in bounded memory."""

import json
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

from distill.data.lines import LONGEST, InvalidRecord, Record, sound_lines
from distill.data.lines import InvalidFile as InvalidFile
from distill.data.lines import lines as lines
from distill.data.remote import RemotePath
from distill.runtime.errors import SettingError, StorageFailed, first_line
from distill.runtime.hub import how_to_do_without, is_hub_reached, is_unreachable

Value = TypeVar("Value", str, list)

PIECE = 1 << 20  # characters after which a plain text file is cut at the next blank line
FEW, MAX_ROWS = 4, 64  # rows of a Parquet file that are in memory at first, and at most
BUFFER = 1 << 20  # bytes of a Parquet column that are read at once


def pieces(
    path: Path, start: int = 0, stop: int | None = None, encoding: str | None = None
) -> Iterator[str | InvalidRecord]:
    """Consecutive texts of about 1 MiB of a plain text file, cut at blank lines where it has any, and its bad lines.

    `start` and `stop` are byte offsets: the lines that begin in [start, stop) are read.
    """
    return _joined(
        sound_lines(path, start, stop, PIECE, encoding),
        lambda line, size: size >= PIECE and (not line.strip() or size >= 2 * PIECE),
    )


def paragraphs(
    path: Path, start: int = 0, stop: int | None = None, encoding: str | None = None
) -> Iterator[str | InvalidRecord]:
    """What stands between two blank lines of a plain text file, and its bad lines; `start` and `stop` as in `pieces`.

    One of more than 16 Mi characters is cut.
    """
    sound = sound_lines(path, start, stop, PIECE, encoding)
    return (text for text in _joined(sound, lambda line, size: not line.strip() or size >= LONGEST) if text)


def whole(path: Path, encoding: str | None = None) -> Iterator[str | InvalidRecord]:
    """The text of a plain text file, and its bad lines; one of more than 16 Mi characters is cut."""
    return _joined(sound_lines(path, limit=PIECE, encoding=encoding), lambda line, size: size >= LONGEST)


def _joined(lines: Iterator[str | InvalidRecord], ends: Callable[[str, int], bool]) -> Iterator[str | InvalidRecord]:
    """Lines put together, up to one after which a text `ends`: a function of the line and the characters so far."""
    text: list[str] = []
    size = 0
    for line in lines:
        if isinstance(line, InvalidRecord):
            yield line
            continue
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


def records(
    path: Path, start: int = 0, stop: int | None = None, encoding: str | None = None
) -> Iterator[Record | InvalidRecord]:
    """Every JSON object of a JSONL file, and the lines that are none; `start` and `stop` as in `pieces`."""
    behind = f" after byte {start:,}" if start else ""
    for number, line in enumerate(sound_lines(path, start, stop, LONGEST, encoding, whole_lines=True), 1):
        if isinstance(line, InvalidRecord):
            yield line
        elif line.strip():
            record = _parsed(line)
            name = f"{path.name}, line {number:,}{behind}"
            yield InvalidRecord(name, record) if isinstance(record, str) else record


def _parsed(line: str) -> Record | str:
    """The JSON object in a line, or the reason why there is none."""
    try:
        record = json.loads(line)
    except ValueError as error:
        return f"not JSON ({error})"
    except RecursionError:
        return "not JSON that can be read (too many brackets within brackets)"
    return record if isinstance(record, dict) else "no JSON object"


def columns(
    path: Path, fields: dict[str, str], start: int = 0, stop: int | None = None, strict: bool = True
) -> Iterator[Record | InvalidRecord]:
    """Columns of the row groups [start, stop) of a Parquet file, row by row.

    Rows of about 16 MiB are in memory, at most 64 of them. What cannot be bounded is one page of the file, which is
    unpacked as a whole, one text, and up to 64 texts of many MB each that follow short ones.

    Args:
        fields: the columns by the setting that names each, such as {"corpus.field": "text"}.
        strict: whether it is an error that there is no such column; else every row is a bad record.

    Raises:
        SettingError: there is no such column.
    """
    import pyarrow
    import pyarrow.parquet

    try:
        # With a buffer a row group is read page by page, not all at once.
        with pyarrow.parquet.ParquetFile(_for_arrow(path), buffer_size=BUFFER) as file:
            names = file.schema_arrow.names
            missing = [error for it, field in fields.items() if (error := unfit_field(field, names, path.name, it))]
            if missing and strict:
                raise missing[0]
            groups = range(start, file.num_row_groups if stop is None else stop)
            number = 1 + _num_rows(file, range(start))
            if missing:
                rows = range(number, number + _num_rows(file, groups))
                yield from (InvalidRecord(f"{path.name}, row {row:,}", str(missing[0]), True) for row in rows)
                return
            for batch in file.iter_batches(FEW, row_groups=groups, columns=list(fields.values())):
                file.reader.set_batch_size(_next_rows(batch))
                yield from _rows(batch, path.name, number)
                number += len(batch)
    except (pyarrow.ArrowException, OSError) as error:
        raise InvalidFile(path.name, f"{type(error).__name__}: {error}") from error


def _for_arrow(path: Path) -> Any:
    """A file as Arrow opens it: at a URL it requests the parts that it needs."""
    return path.open("rb", buffered=False) if isinstance(path, RemotePath) else path


def _num_rows(file: Any, groups: Iterable[int]) -> int:
    return sum(file.metadata.row_group(group).num_rows for group in groups)


def _next_rows(batch: Any) -> int:
    """How many rows to read after these: twice as many, up to 64, fewer where rows are long.

    Measured, since no size in the file shows it: one text that a dictionary holds once may be in every row.
    """
    return max(1, min(2 * len(batch), MAX_ROWS, LONGEST * len(batch) // max(batch.nbytes, 1)))


def _rows(batch: Any, name: str, number: int) -> Iterator[Record | InvalidRecord]:
    """The rows of an Arrow batch, the first of which has this number in its file; one that is not UTF-8 is bad."""
    if batch.nbytes <= LONGEST:
        try:
            yield from batch.to_pylist()
            return
        except UnicodeDecodeError:
            pass
    for index in range(len(batch)):  # long rows are not all held twice
        try:
            row = batch.slice(index, 1).to_pylist()[0]
        except UnicodeDecodeError as error:
            yield InvalidRecord(f"{name}, row {number + index:,}", f"not UTF-8 ({error.reason})")
        else:
            yield row


def column_names(path: Path) -> list[str]:
    """The columns of a Parquet file; none where it cannot be read, so that the reader reports the error."""
    import pyarrow
    import pyarrow.parquet

    try:
        return [str(name) for name in pyarrow.parquet.read_schema(_for_arrow(path)).names]
    except (pyarrow.ArrowException, OSError):
        return []


def num_row_groups(path: Path) -> int:
    """The row groups of a Parquet file; 1 where it cannot be read, so that the reader reports the error."""
    import pyarrow
    import pyarrow.parquet

    try:
        return int(pyarrow.parquet.ParquetFile(_for_arrow(path)).num_row_groups)
    except (pyarrow.ArrowException, OSError):
        return 1


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


def sound_rows(rows: Any, start: int, stop: int) -> Iterator[Record | InvalidRecord]:
    """The rows [start, stop) of a data set of `datasets`; one that is not UTF-8 is bad."""
    begin = start
    try:
        for row in rows.select(range(start, stop)):
            yield row
            begin += 1
        return
    except UnicodeDecodeError:  # a whole batch of rows is lost then, so they are read one by one
        pass
    for index in range(begin, stop):
        try:
            row = rows[index]
        except UnicodeDecodeError as error:
            yield InvalidRecord(f"row {index + 1:,}", f"not UTF-8 ({error.reason})")
        else:
            yield row


def streamed_rows(rows: Any, what: str) -> Iterator[Record]:
    """The rows of a data set that comes from the network, which `what` names.

    Raises:
        InvalidFile: a row cannot be read.
        StorageFailed: the network fails.
    """
    try:
        yield from rows
    except ValueError as error:  # of UTF-8, of Arrow, and of types that change on the way
        raise InvalidFile(what, f"{type(error).__name__}: {first_line(error)}") from error
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


def value_of(record: Record, field: str, name: str, setting: str, kind: type[Value]) -> Value:
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
        expected = "text" if kind is str else f"a {kind.__name__}"
        raise SettingError(f"{setting}={field}: in {name} it holds {type(value).__name__}, not {expected}")
    return value


def unfit_field(field: str, names: list[str], name: str, setting: str) -> SettingError | None:
    """For columns of a file of this name among which the field is none, or is not the only one; else None."""
    if field not in names:
        return no_field(field, names, name, setting)
    if (count := names.count(field)) > 1:
        return SettingError(
            f"{setting}={field}: {name} has {count} columns of this name, and which is meant is not known: rename or "
            "remove the others"
        )
    return None


def no_field(field: str, fields: list[str], name: str, setting: str) -> SettingError:
    """For a record or file of this name that lacks a field; `fields` are those that it has."""
    return SettingError(f"{setting}={field}: {name} has no such field; it has {', '.join(map(str, fields)) or 'none'}")
