"""Text and sequences at URLs are the same as on a disk, over a real S3 server, and storage that fails loses nothing."""

import gzip
import io
import json
import os
import threading
import zipfile
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientPayloadError
from job import wait_for
from object_store import serving
from shards import assert_same_rows, prepare, source_of, start, write_text

from distill.data import readers, remote
from distill.data.contents import contents_of
from distill.data.find_files import find_files
from distill.data.remote import file_system, retried
from distill.data.sources import _files
from distill.data.sources.gutenberg import books
from distill.data.storage import Folder
from distill.data.tables.table import Table
from distill.runtime.errors import SettingError, StorageFailed

pytest.importorskip("moto")
pytest.importorskip("s3fs")


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    with serving() as url:
        yield url


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long a retry would have waited."""
    pauses: list[float] = []
    monkeypatch.setattr(remote, "pause", lambda seconds, signals: pauses.append(seconds))
    return pauses


@pytest.fixture
def text(tmp_path: Path) -> Path:
    return write_text(tmp_path / "text", files=3)


def upload(folder: Path, url: str) -> None:
    for file in folder.iterdir():
        put(f"{url}/{file.name}", file.read_bytes())


def put(url: str, content: bytes) -> None:
    system, path = file_system(url, "corpus.path")
    system.pipe_file(path, content)


# --- sequences


def test_text_and_rows_in_a_bucket_are_those_of_a_disk(
    bucket: str, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_files, "SHARD_BYTES", 1)
    local = prepare(text, tmp_path / "local", tmp_path / "scratch", shard_bytes=4000)
    upload(text, f"{bucket}/same/text")
    place = f"{bucket}/same/rows"
    index = prepare(f"{bucket}/same/text", place, tmp_path / "scratch", shard_bytes=4000)
    assert_same_rows(place, tmp_path / "local")
    assert (index.train, index.heldout) == (local.train, local.heldout)
    names = Folder(place, "data.tokens").names()
    assert "parts" not in names and "train-00002.bin" in names and not list((tmp_path / "scratch").iterdir())


@pytest.mark.slow
def test_hosts_share_the_work_in_a_bucket(bucket: str, text: Path, tmp_path: Path) -> None:
    """The host that is killed perhaps leaves half an upload behind; the same command makes its share."""
    place = f"{bucket}/hosts/rows"
    folder = Folder(place, "data.tokens")
    hosts = [start(text, place, tmp_path / name, host=host, hosts=2) for host, name in enumerate("ab")]
    wait_for(lambda: any(name.endswith(".json") for name in folder.names("parts")), *hosts)
    hosts[1].kill()
    hosts[1] = start(text, place, tmp_path / "b", host=1, hosts=2)
    outputs = [host.communicate(timeout=500) for host in hosts]
    assert hosts[0].returncode == hosts[1].returncode == 0, outputs
    prepare(text, tmp_path / "local", tmp_path / "scratch", shard_bytes=4000)
    assert_same_rows(place, tmp_path / "local")
    assert not folder.names("parts")


@pytest.mark.slow
def test_processes_and_ranges_of_a_large_file_read_from_a_bucket(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranges end within lines; each is asked for alone, by another process."""
    monkeypatch.setattr(_files, "SHARD_BYTES", 1)
    monkeypatch.setattr(_files, "RANGE_BYTES", 3000)
    monkeypatch.setattr("distill.data.build_tokens.FEW_BYTES", 0)
    file = write_text(tmp_path / "text", files=1) / "0.jsonl"
    put(f"{bucket}/ranges/0.jsonl", file.read_bytes())
    source = source_of(f"{bucket}/ranges/0.jsonl")
    assert len(source.shards()) > 2
    prepare(source, f"{bucket}/ranges/rows", tmp_path / "scratch", workers=2)
    monkeypatch.setattr(_files, "RANGE_BYTES", 1 << 30)
    prepare(file, tmp_path / "local", tmp_path / "scratch")
    assert_same_rows(f"{bucket}/ranges/rows", tmp_path / "local")


def test_every_kind_of_file_is_read(bucket: str, tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("book.txt", "It was a book.\n" * 99)
    table = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({"text": [f"row {n}" for n in range(99)]}), table, row_group_size=10)
    put(f"{bucket}/kinds/a.txt", b"one\ntwo\n")
    put(f"{bucket}/kinds/below/b.txt.gz", gzip.compress(b"three\n"))
    put(f"{bucket}/kinds/c.zip", packed.getvalue())
    put(f"{bucket}/kinds/d.parquet", table.getvalue())
    put(f"{bucket}/kinds/e.csv", b"text\nfour\n")
    assert list(readers.lines(f"{bucket}/kinds/a.txt")) == [(1, "one\n"), (2, "two\n")]
    assert list(readers.lines(f"{bucket}/kinds/below/b.txt.gz")) == [(1, "three\n")]
    ((name, text),) = books(f"{bucket}/kinds/c.zip")
    assert name == "c.zip/book.txt" and str(text).startswith("It was a book.")
    rows = readers.parquet_rows(f"{bucket}/kinds/d.parquet", ["text"], 3, 5)
    assert [(number, row["text"]) for number, row in rows] == [(n + 1, f"row {n}") for n in range(30, 50)]
    (shard,) = source_of(f"{bucket}/kinds", "csv").shards()
    assert [each.text for each in source_of(f"{bucket}/kinds", "csv").documents(shard)] == ["four"]


def test_folders_of_reviews_and_tables_are_found(bucket: str) -> None:
    for name, content in (("pos/1.txt", b"Good.<br />Fine."), ("neg/2.txt", b"Bad."), ("unsup/3.txt", b"None.")):
        put(f"{bucket}/imdb/train/{name}", content)
    reviews = source_of(f"{bucket}/imdb", "imdb")
    texts = [each.text for shard in reviews.shards() for each in reviews.documents(shard)]
    assert texts == ["Bad.", "Good.\n\nFine."]
    for name in ("train.tsv", "dev.tsv"):
        put(f"{bucket}/table/{name}", b"text\tlabel\n" + name.encode() + b"\tyes\nno\tno\n")
    found = Table(path=f"{bucket}/table", split="train").read("corpus", training=True)
    assert found.first == ["train.tsv", "no"] and found.classes == ("no", "yes")


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


def test_files_keep_the_protocol_of_their_folder(bucket: str) -> None:
    """fsspec lists those of s3a:// as s3://, by which their names below the folder would be cut wrongly."""
    for name in ("train.jsonl", "test.jsonl"):
        put(f"{bucket}/other/{name}", json.dumps({"text": name}).encode())
    folder = f"{bucket.replace('s3://', 's3a://')}/other/"
    assert [file.place for file in source_of(folder).files] == [f"{folder}train.jsonl"]  # type: ignore[attr-defined]


def contents(url: str) -> list[Any]:
    return contents_of(source_of(url).text_files, "nowhere")


def test_the_identity_follows_the_content(bucket: str) -> None:
    url = f"{bucket}/identity/a.jsonl"
    put(url, b'{"text": "one"}')
    before = contents(url)
    assert contents(f"{bucket}/identity") == before == contents(url)
    put(f"{bucket}/elsewhere/b/a.jsonl", b'{"text": "one"}')
    assert contents(f"{bucket}/elsewhere") == before
    put(url, b'{"text": "two"}')  # of the same size
    assert contents(url) != before


def test_http_reads_ranges_and_needs_no_listing(bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_files, "SHARD_BYTES", 1)
    monkeypatch.setattr(_files, "RANGE_BYTES", 3000)
    text = (write_text(tmp_path / "text", files=1) / "0.jsonl").read_bytes()
    put(f"{bucket}/web/0.jsonl", text)
    url = f"{os.environ['AWS_ENDPOINT_URL']}/bucket/web/0.jsonl"
    source = source_of(f"{url}?X-Amz-Signature=abc")
    assert len(source.shards()) > 2 and contents(f"{url}?X-Amz-Signature=abc")[0][0] == url
    texts = [each.text for shard in source.shards() for each in source.documents(shard)]
    assert texts == [json.loads(line)["text"] for line in text.splitlines()]


def test_a_page_of_links_is_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a.txt").write_text("one\ntwo\n")
    (tmp_path / "large.txt").write_text("many\n" * 9)
    handler = partial(SimpleHTTPRequestHandler, directory=str(tmp_path))
    monkeypatch.setattr(SimpleHTTPRequestHandler, "log_message", lambda *_: None)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        large, small = source_of(f"http://127.0.0.1:{server.server_port}/", "text").files  # type: ignore[attr-defined]
        assert [large.name, small.name] == ["large.txt", "a.txt"]
        assert [line for _, line in readers.lines(small.place)] == ["one\n", "two\n"]
        server.shutdown()


@pytest.mark.parametrize(
    ("url", "line"),
    [
        ("s3://bucket/none", r"no such file or folder; correct the path"),
        ("s3://no-such-bucket/x", r"no such file or folder; correct the path"),
        ("http://127.0.0.1:1/x.txt", r"cannot be reached \(.*check the name, the network, and the credentials"),
        ("nowhere://a/b", r"Protocol not known: nowhere: give a local path, or s3://"),
    ],
)
def test_what_is_not_there_is_one_line(bucket: str, url: str, line: str) -> None:
    with pytest.raises(SettingError, match=rf"^corpus\.path={url}.*{line}"):
        source_of(url)


def test_a_place_that_cannot_be_written_is_one_line(bucket: str, text: Path, tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"^data\.tokens=s3://no-such-bucket/rows cannot be reached \("):
        prepare(text, "s3://no-such-bucket/rows", tmp_path / "scratch")
    with pytest.raises(StorageFailed, match=r"^http://127\.0\.0\.1:1/rows/.* storage has failed 12 times"):
        prepare(text, "http://127.0.0.1:1/rows", tmp_path / "scratch")


def test_a_missing_package_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(url: str) -> Any:
        raise ImportError("Please install gcsfs to access Google Storage")

    monkeypatch.setattr("fsspec.core.url_to_fs", missing)
    with pytest.raises(SettingError, match=r"^data\.tokens=gs://a/b: .*gcsfs.*pip install 'distill-kd\[gcs\]'"):
        file_system("gs://a/b", "data.tokens")


def test_names_of_the_hub_go_to_its_own_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distill.data.remote.is_hub_reached", lambda: True)
    assert type(file_system("hf://datasets/a/b", "corpus.path")[0]).__name__ == "HfFileSystem"


# --- storage that fails


def test_errors_of_libraries_are_of_storage(no_pauses: list[float]) -> None:
    of_library = type("ServerDisconnected", (Exception,), {"__module__": "aiohttp.client_exceptions"})
    left: list[Exception] = [of_library("cut"), EOFError("short"), json.JSONDecodeError("no answer", "", 0)]

    def call() -> str:
        if left:
            raise left.pop()
        return "done"

    assert retried(call, "s3://a/b") == "done" and len(no_pauses) == 3


def test_what_fails_is_asked_for_again_after_growing_pauses(no_pauses: list[float]) -> None:
    left = [ConnectionResetError("cut"), TimeoutError("slow"), OSError("503")]

    def call() -> str:
        if left:
            raise left.pop()
        return "done"

    assert retried(call, "s3://a/b") == "done" and len(no_pauses) == 3
    assert all(0 <= pause <= remote.FIRST_PAUSE * 2**number for number, pause in enumerate(no_pauses, 1))


def test_what_keeps_failing_ends_the_run_and_what_is_not_there_is_not_asked_for_twice(no_pauses: list[float]) -> None:
    def fail(error: Exception) -> Any:
        raise error

    with pytest.raises(StorageFailed, match=r"^s3://a/b: storage has failed 12 times, at last with OSError: 503"):
        retried(lambda: fail(OSError("503")), "s3://a/b")
    assert len(no_pauses) == remote.ATTEMPTS - 1 and max(no_pauses) <= remote.LONGEST_PAUSE
    no_pauses.clear()
    # The last three are mistakes in a program, which said "restore access" a minute and a half later.
    for error in (FileNotFoundError("x"), PermissionError("x"), TypeError("x"), KeyError("x"), ValueError("x")):
        with pytest.raises(type(error)):
            retried(lambda error=error: fail(error), "s3://a/b")
    assert not no_pauses


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


def test_an_upload_that_fails_is_made_again(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_pauses: list[float]
) -> None:
    folder = Folder(f"{bucket}/upload", "data.tokens")
    system, _ = file_system(bucket, "data.tokens")
    put_file, calls = system.put_file, []

    def cut(local: str, *args: Any, **more: Any) -> None:
        calls.append(local)
        if len(calls) < 3:
            raise ConnectionResetError("cut")
        put_file(local, *args, **more)

    monkeypatch.setattr(system, "put_file", cut)
    (tmp_path / "rows").write_bytes(b"rows")
    folder.put(tmp_path / "rows", "shard")
    assert folder.read("shard") == b"rows" and len(calls) == 3
