"""Text and sequences at URLs are the same as on a disk, over a real S3 server, and storage that fails loses nothing."""

import gzip
import io
import json
import os
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas
import pytest
from aiohttp import ClientPayloadError
from object_store import serving
from reading import texts
from shards import assert_same_rows, prepare, source_of, write_text

from distill.data import remote
from distill.data.contents import contents_of
from distill.data.find_files import find_files
from distill.data.remote import file_system, retried
from distill.data.sources import _files
from distill.data.storage import Folder
from distill.runtime.errors import SettingError, StorageFailed

pytest.importorskip("moto")
pytest.importorskip("s3fs")


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    with serving() as url:
        yield url


@pytest.fixture(autouse=True)
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long retries would have waited."""
    found: list[float] = []
    monkeypatch.setattr(remote, "pause", lambda seconds, signals: found.append(seconds))
    return found


@pytest.fixture
def text(tmp_path: Path) -> Path:
    return write_text(tmp_path / "text", files=3)


def put(url: str, content: bytes) -> None:
    system, path = file_system(url, "corpus.path")
    system.pipe_file(path, content)


def upload(folder: Path, url: str) -> None:
    for file in folder.iterdir():
        put(f"{url}/{file.name}", file.read_bytes())


def zipped() -> bytes:
    with zipfile.ZipFile(packed := io.BytesIO(), "w") as archive:
        archive.writestr("book.txt", "It was a book.")
    return packed.getvalue()


def parquet() -> bytes:
    pandas.DataFrame({"text": [f"row {n}" for n in range(99)]}).to_parquet(table := io.BytesIO(), row_group_size=10)
    return table.getvalue()


# --- sequences


@pytest.mark.usefixtures("small_units")
def test_text_and_rows_in_a_bucket_are_those_of_a_disk(bucket: str, text: Path, tmp_path: Path) -> None:
    local = prepare(text, tmp_path / "local", tmp_path / "scratch", shard_bytes=4000)
    upload(text, f"{bucket}/same/text")
    place = f"{bucket}/same/rows"
    index = prepare(f"{bucket}/same/text", place, tmp_path / "scratch", shard_bytes=4000)
    assert_same_rows(place, tmp_path / "local")
    assert (index.train, index.heldout) == (local.train, local.heldout)
    names = Folder(place, "data.tokens").names()
    assert "parts" not in names and "train-00002.bin" in names and not list((tmp_path / "scratch").iterdir())


# --- what a URL names


def test_a_url_is_a_file_a_folder_or_a_pattern(bucket: str) -> None:
    for name in ("a.txt", "b.txt.gz", "sub/c.txt", "sub/d.md"):
        put(f"{bucket}/listed/{name}", b"x")

    def found(url: str) -> list[str]:
        files = find_files(url, "corpus.path", (".txt",))
        assert all(file.size == 1 for file in files)
        return [file.place.removeprefix(f"{bucket}/listed/") for file in files]

    assert found(f"{bucket}/listed") == found(f"{bucket}/listed/") == ["a.txt", "b.txt.gz", "sub/c.txt"]
    assert found(f"{bucket}/listed/sub/d.md") == ["sub/d.md"]
    assert found(f"{bucket}/listed/*.txt") == ["a.txt"] and found(f"{bucket}/listed/**/*.txt") == ["a.txt", "sub/c.txt"]
    # fsspec lists files of s3a:// as s3://, by which their names below the folder would be cut wrongly.
    other = f"{bucket.replace('s3://', 's3a://')}/listed/"
    assert [file.place for file in find_files(other, "corpus.path", (".md",))] == [f"{other}sub/d.md"]


def contents(url: str) -> list[Any]:
    return contents_of(source_of(url).text_files, "nowhere")


@pytest.mark.usefixtures("small_units")
def test_http_reads_ranges_and_needs_no_listing(bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the identity follows the content, not the place or what follows a question mark."""
    monkeypatch.setattr(_files, "RANGE_BYTES", 3000)
    text = (write_text(tmp_path / "text", files=1) / "0.jsonl").read_bytes()
    for name in ("web/0.jsonl", "elsewhere/b/0.jsonl"):
        put(f"{bucket}/{name}", text)
    url = f"{os.environ['AWS_ENDPOINT_URL']}/bucket/web/0.jsonl"
    source = source_of(f"{url}?X-Amz-Signature=abc")
    assert len(source.shards()) > 2 and contents(f"{url}?X-Amz-Signature=abc")[0][0] == url
    found = [each.text for shard in source.shards() for each in source.documents(shard)]
    assert found == [json.loads(line)["text"] for line in text.splitlines()]
    before = contents(f"{bucket}/web/0.jsonl")
    assert contents(f"{bucket}/web") == contents(f"{bucket}/elsewhere") == before
    put(f"{bucket}/web/0.jsonl", text.replace(b"a", b"e"))  # of the same size
    assert contents(f"{bucket}/web") != before


@pytest.mark.parametrize(
    ("url", "line"),
    [
        ("s3://bucket/none", r"no such file or folder; correct the path"),
        ("s3://no-such-bucket/x", r"no such file or folder; correct the path"),
        ("http://127.0.0.1:1/x.txt", r"cannot be reached \(.*check the name, the network, and the credentials"),
        ("nowhere://a/b", r"Protocol not known: nowhere: give a local path, or s3://"),
        ("gs://bucket/x", r"gcsfs.*pip install 'distill-kd\[gcs\]'"),
    ],
)
def test_what_is_not_there_is_one_line(bucket: str, url: str, line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(SettingError, match=rf"^corpus\.path={url}.*{line}"):
        source_of(url)


@pytest.mark.parametrize(
    ("kind", "files", "expected"),
    [
        ("text", {"a.txt": b"one\ntwo\n", "below/b.txt.gz": gzip.compress(b"three\n")}, ["one\ntwo", "three"]),
        ("csv", {"e.csv": b"text\nfour\n"}, ["four"]),
        (
            "imdb",
            {f"train/{name}": name.encode() for name in ("pos/1.txt", "neg/2.txt", "unsup/3.txt")},
            ["neg/2.txt", "pos/1.txt"],
        ),
        ("gutenberg", {"c.zip": zipped}, ["It was a book."]),
        ("parquet", {"d.parquet": parquet}, [f"row {n}" for n in range(99)]),
    ],
)
def test_every_kind_of_file_is_read(bucket: str, kind: str, files: dict[str, Any], expected: list[str]) -> None:
    for name, content in files.items():
        put(f"{bucket}/{kind}/{name}", content() if callable(content) else content)
    assert texts(kind=kind, path=f"{bucket}/{kind}") == expected


def test_a_place_that_cannot_be_written_is_one_line(bucket: str, text: Path, tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"^data\.tokens=s3://no-such-bucket/rows cannot be reached \("):
        prepare(text, "s3://no-such-bucket/rows", tmp_path / "scratch")
    with pytest.raises(StorageFailed, match=r"^http://127\.0\.0\.1:1/rows/.* storage has failed 12 times"):
        prepare(text, "http://127.0.0.1:1/rows", tmp_path / "scratch")


# --- storage that fails


def failing(*errors: Exception) -> Any:
    """A call that raises these, one after the other, and then succeeds."""
    left = [*errors]

    def call() -> str:
        if left:
            raise left.pop()
        return "done"

    return call


def test_what_fails_is_asked_for_again_after_growing_pauses(pauses: list[float]) -> None:
    of_library = type("ServerDisconnected", (Exception,), {"__module__": "aiohttp.client_exceptions"})
    passing = [ConnectionResetError("cut"), TimeoutError("slow"), OSError("503"), of_library("cut"), EOFError("short")]
    passing.append(json.JSONDecodeError("no answer", "", 0))
    assert retried(failing(*passing), "s3://a/b") == "done" and len(pauses) == 6
    assert all(0 <= pause <= remote.FIRST_PAUSE * 2**number for number, pause in enumerate(pauses, 1))


def test_what_keeps_failing_ends_the_run_and_what_is_not_there_is_not_asked_for_twice(pauses: list[float]) -> None:
    with pytest.raises(StorageFailed, match=r"^s3://a/b: storage has failed 12 times, at last with OSError: 503"):
        retried(failing(*[OSError("503")] * 12), "s3://a/b")
    assert len(pauses) == remote.ATTEMPTS - 1 and max(pauses) <= remote.LONGEST_PAUSE
    pauses.clear()
    # The last three are mistakes in a program, which said "restore access" a minute and a half later.
    for error in (FileNotFoundError("x"), PermissionError("x"), TypeError("x"), KeyError("x"), ValueError("x")):
        with pytest.raises(type(error)):
            retried(failing(error), "s3://a/b")
    assert not pauses


@pytest.mark.parametrize("error", [OSError("503"), ClientPayloadError("503")])
def test_storage_that_fails_in_the_middle_of_a_text_does_not_leave_text_out(
    bucket: str, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """It is no damage of the file, which somebody would have to mend."""
    upload(text, f"{bucket}/fails/text")
    source = source_of(f"{bucket}/fails/text")
    system, _ = file_system(bucket, "corpus.path")

    def fail(*_: Any, **more: Any) -> Any:
        raise error

    monkeypatch.setattr(type(system.open(system.find(bucket)[0])), "_fetch_range", fail)
    with pytest.raises(StorageFailed, match=r"fails/text/.*could not be read further \(\w+: 503\)"):
        prepare(source, tmp_path / "place", tmp_path / "scratch")


def test_an_upload_that_fails_or_is_cut_is_made_again(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pauses: list[float]
) -> None:
    folder, (system, _) = Folder(f"{bucket}/upload", "data.tokens"), file_system(bucket, "data.tokens")
    put_file = system.put_file
    attempts = iter([failing(ConnectionResetError("cut")), lambda: system.pipe_file("bucket/upload/shard", b"ro")])
    monkeypatch.setattr(system, "put_file", lambda *given: next(attempts, lambda: put_file(*given))())
    (tmp_path / "rows").write_bytes(b"rows")
    folder.put(tmp_path / "rows", "shard")
    assert folder.read("shard") == b"rows" and len(pauses) == 2
