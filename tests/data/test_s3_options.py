"""Of an S3 library every failure comes back at once, unless the user has chosen retries."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from object_store import ACCESS, forget_servers
from stored import Answer, Faulty

from distill.data.remote import file_system
from distill.data.s3_options import s3_options

s3fs = pytest.importorskip("s3fs")


@pytest.fixture(autouse=True)
def untouched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """No settings of whoever runs the tests."""
    for name in ("AWS_MAX_ATTEMPTS", "AWS_RETRY_MODE", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setattr("fsspec.config.conf", {})
    forget_servers()
    yield
    forget_servers()


def requests(monkeypatch: pytest.MonkeyPatch, call: Any) -> int:
    """How many requests a call makes of a service that answers each with 503."""
    server = Faulty(lambda *_: Answer(503, [], b"<Error><Code>SlowDown</Code></Error>"))
    with server.serving() as url:
        for name, value in {**ACCESS, "AWS_ENDPOINT_URL": url}.items():
            monkeypatch.setenv(name, value)
        system, path = file_system("s3://bucket/a", "corpus.path")
        with pytest.raises(OSError):
            call(system, path)
    return server.requests


def test_a_request_that_fails_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    assert requests(monkeypatch, lambda system, path: system.cat_file(path, start=0, end=9)) == 1


def test_file_systems_of_others_keep_their_attempts() -> None:
    s3fs.S3FileSystem(**s3_options("s3"))
    system, path = file_system("s3://bucket/a/b", "corpus.path")
    assert (system.retries, path) == (1, "bucket/a/b")
    assert s3fs.S3FileSystem(**s3_options("s3")).retries == s3fs.S3FileSystem.retries > 1


@pytest.mark.slow
def test_a_choice_of_the_user_stays(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert s3_options("s3")["config_kwargs"] == {"retries": {"max_attempts": 0}} and s3_options("gs") == {}
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "2")
    assert s3_options("s3") == {}
    assert requests(monkeypatch, lambda system, path: system.cat_file(path, start=0, end=9)) > 1
    monkeypatch.delenv("AWS_MAX_ATTEMPTS")
    (tmp_path / "config").write_text("[default]\nretry_mode = adaptive\n")
    assert s3_options("s3a") == {}
    monkeypatch.setenv("AWS_PROFILE", "none")  # which is said when storage is reached
    assert "retries" in s3_options("s3")["config_kwargs"]


@pytest.mark.parametrize("protocol", ["s3", "s3a"])
def test_other_settings_of_fsspec_stay(monkeypatch: pytest.MonkeyPatch, protocol: str) -> None:
    monkeypatch.setattr("fsspec.config.conf", {protocol: {"config_kwargs": {"read_timeout": 3}, "anon": True}})
    assert s3_options("s3")["config_kwargs"] == {"read_timeout": 3, "retries": {"max_attempts": 0}}
    monkeypatch.setattr("fsspec.config.conf", {protocol: {"config_kwargs": {"retries": {"max_attempts": 9}}}})
    assert s3_options("s3") == {}
