"""Readers of one file, or one Hub data set, that give its texts in bounded memory."""

import codecs
import gzip
import json
import re
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from distill.errors import SettingError

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
    lines: list[str] = []
    size = 0
    for line in _lines(path, start, stop, limit=PIECE):
        lines.append(line)
        size += len(line)
        if size >= PIECE and (not line.strip() or size >= 2 * PIECE):
            yield "".join(lines).strip()
            lines, size = [], 0
    yield "".join(lines).strip()


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


_HEADING = re.compile(r"\s*((?:= )+)(.*?)((?: =)+)\s*$")
_MARK = re.compile(r" ?@([-,.])@ ?")


def articles(lines: Iterable[str]) -> Iterator[str]:
    """WikiText articles: split at ` = Title = `, headings without their marks, `@-@ @,@ @.@` joined back.

    Only a line between blank ones is a title, since formulas wrapped over lines can look like one. Where no title
    comes, an article ends after 1 MiB.
    """
    article: list[str] = []
    size = 0
    for before, line, after in _neighbours(lines):
        heading = _HEADING.match(line)
        if heading and len(heading[1]) == len(heading[3]) and not before.strip() and not after.strip():
            line = heading[2]
            ends = len(heading[1]) == 2  # one mark on either side: the title of the next article
        else:
            ends = size >= PIECE
        if ends and article:
            yield "\n\n".join(article)
            article, size = [], 0
        if line.strip():
            article.append(_MARK.sub(r"\1", line.strip()))
            size += len(line)
    yield "\n\n".join(article)


def _neighbours(lines: Iterable[str]) -> Iterator[tuple[str, str, str]]:
    """Each line with the one before and the one after it, empty at the ends."""
    before, line = "", None
    for after in lines:
        if line is not None:
            yield before, line, after
            before = line
        line = after
    if line is not None:
        yield before, line, ""


def wikitext(path: Path, start: int = 0, stop: int | None = None) -> Iterator[str]:
    """The articles of a WikiText file; one that crosses `stop` is cut there."""
    return articles(_lines(path, start, stop))


_BREAK = re.compile(r"\s*(?:<br\s*/?>\s*)+", re.I)
_C1 = {code: bytes([code]).decode("cp1252", errors="ignore") for code in range(0x80, 0xA0)}


def review(text: str) -> str:
    """An IMDB review with `<br />` as paragraph ends and C1 control characters as the Windows-1252 signs they were."""
    return _BREAK.sub("\n\n", text.translate(_C1)).strip()


def review_file(path: Path) -> Iterator[str]:
    """The one review of a file of the original folder form."""
    yield review("".join(_lines(path)))


def records(path: Path, field: str, setting: str, start: int = 0, stop: int | None = None) -> Iterator[str]:
    """`field` of every JSON object of a JSONL file; `start` and `stop` as in `pieces`.

    Raises:
        SettingError: an object has no such field. Unreadable: a line is no JSON object.
    """
    for number, line in enumerate(_lines(path, start, stop), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError as error:
            raise Unreadable(path.name, f"line {number} is not JSON ({error})") from error
        if not isinstance(record, dict):
            raise Unreadable(path.name, f"line {number} is no JSON object")
        yield _text(record, field, path.name, setting)


def columns(path: Path, field: str, setting: str, start: int = 0, stop: int | None = None) -> Iterator[str]:
    """Column `field` of the row groups [start, stop) of a Parquet file, 256 rows at a time."""
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            if field not in file.schema_arrow.names:
                raise _no_field(field, file.schema_arrow.names, path.name, setting)
            groups = range(start, file.num_row_groups if stop is None else stop)
            for batch in file.iter_batches(256, row_groups=groups, columns=[field]):
                for value in batch.column(0).to_pylist():
                    yield _text({field: value}, field, path.name, setting)
    except (pyarrow.ArrowException, OSError) as error:
        raise Unreadable(path.name, f"{type(error).__name__}: {error}") from error


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


def hub_texts(rows: Iterable[dict[str, Any]], field: str, hub: str, setting: str) -> Iterator[str]:
    """Column `field` of the rows of a Hub data set."""
    for row in rows:
        yield _text(row, field, hub, setting)


def _text(record: dict[str, Any], field: str, name: str, setting: str) -> str:
    if field not in record:
        raise _no_field(field, list(record), name, setting)
    value = record[field]
    if value is None:
        return ""
    if not isinstance(value, str):
        raise SettingError(f"{setting}.field={field}: in {name} it holds {type(value).__name__}, not text")
    return value


def _no_field(field: str, fields: list[str], name: str, setting: str) -> SettingError:
    return SettingError(f"{setting}.field={field}: {name} has no such field; it has {', '.join(map(str, fields))}")


def _lines(path: Path, start: int = 0, stop: int | None = None, limit: int = -1) -> Iterator[str]:
    """Lines of a UTF-8 file, plain or gzip, that begin in bytes [start, stop); one over `limit` bytes comes in parts.

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
