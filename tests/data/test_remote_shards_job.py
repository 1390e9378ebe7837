"""Whole runs on sequences in object storage: the student is that of a disk, bitwise; failing storage ends nothing."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from job import Shelf, assert_same, results
from object_store import forget_servers, serving
from stored import Answer, Faulty, forwarded

from distill.data import remote
from distill.data.sources import _files

pytest.importorskip("moto")
s3fs = pytest.importorskip("s3fs")

# Files of about 3 kB, of which two make a window, and four are kept on the machine: it fetches all the time.
SMALL = ["data.shard_bytes=3000", "data.shuffle_bytes=6000", "data.local_bytes=12500", "corpus.max_sequences=null"]
RUN = [*SMALL, "train.epochs=null", "train.steps=45", "train.save_every=5", "evaluate.pseudo_perplexity.fraction=0"]


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    with serving("rows") as url:
        yield url


@pytest.fixture(scope="module")
def local(shelf: Shelf) -> Iterator[Path]:
    """The folder of a run on plain shards of this machine."""
    folder = shelf.root / "local_rows"
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(_files, "SHARD_BYTES", 1)
        assert shelf.run(folder, *RUN, f"data.cache={shelf.root / 'small'}") == 0
        yield folder


@pytest.fixture
def proxy(bucket: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Faulty]:
    """Between the runs and the S3 server."""
    host, port = os.environ["AWS_ENDPOINT_URL"].removeprefix("http://").split(":")
    monkeypatch.setattr(remote, "FIRST_PAUSE", 0.001)
    monkeypatch.setattr(remote, "LONGEST_PAUSE", 0.01)
    server = Faulty(forwarded(host, int(port)))
    with server.serving() as url:
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
        forget_servers()
        yield server
    forget_servers()


def stored(shelf: Shelf, bucket: str) -> list[str]:
    """Sequences in the bucket, and a cache of their files on this machine."""
    return [
        *RUN, f"data.tokens={bucket}/tokens", f"data.local={shelf.root / 'node'}",
        f"data.cache={shelf.root / 'other'}",
    ]  # fmt: skip


@pytest.mark.slow
def test_the_student_does_not_depend_on_where_rows_lie(shelf: Shelf, local: Path, bucket: str, proxy: Faulty) -> None:
    """Files on a disk, in storage, and the same behind storage that fails."""
    sound, broken = shelf.root / "sound", shelf.root / "broken"
    assert shelf.run(sound, *stored(shelf, bucket)) == 0  # prepares the sequences, too
    assert_same(sound, local)
    assert results(sound)["evaluation"] == results(local)["evaluation"]
    proxy.share = 0.3
    assert shelf.run(broken, *stored(shelf, bucket)) == 0
    assert_same(broken, local)
    assert proxy.faults
    size = sum(file.stat().st_size for file in (shelf.root / "node" / "shards").iterdir())
    assert size <= 12_500


@pytest.mark.slow  # the S3 library tries several times in each of the eight attempts
def test_a_run_whose_storage_goes_away_goes_on_when_it_is_back(
    shelf: Shelf, local: Path, bucket: str, proxy: Faulty, capfd: pytest.CaptureFixture[Any]
) -> None:
    folder, source = shelf.root / "interrupted", proxy.source

    def until_a_checkpoint(*request: Any) -> Answer:
        if any(folder.glob("checkpoints/*")):
            proxy.last = proxy.requests
        return source(*request)

    proxy.source = until_a_checkpoint
    assert shelf.run(folder, *stored(shelf, bucket)) == 74
    said = capfd.readouterr().err
    assert "storage has failed 12 times, at last with" in said.splitlines()[-1] and "Traceback" not in said
    assert any(folder.glob("checkpoints/*"))
    proxy.source, proxy.last = source, 1 << 60
    assert shelf.run(folder, *stored(shelf, bucket)) == 0
    assert_same(folder, local)
