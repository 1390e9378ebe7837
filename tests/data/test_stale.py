"""What a host that never comes back leaves of a preparation is removed once the sequences are finished, not sooner."""

import os
import time
from pathlib import Path

import pytest
from shards import packing, read_rows, source_of, write_text

from distill.config.settings import DataConfig
from distill.data import tokens
from distill.data.shards.claims import STALE
from distill.data.shards.destination import LocalFolder
from distill.data.stale import remove_stale, scratch_name
from distill.data.tokens import Text


def aged(folder: Path, seconds: float) -> Path:
    """A folder with a file in a folder, in which nothing has changed for so long."""
    (folder / "00001").mkdir(parents=True)
    (folder / "00001" / "000003.train").write_bytes(b"rows")
    then = time.time() - seconds
    for path in (folder / "00001" / "000003.train", folder / "00001", folder):
        os.utime(path, (then, then))
    return folder


def test_folders_of_hosts_that_are_gone_are_removed_and_no_others(tmp_path: Path, lines: list[str]) -> None:
    gone, alive = aged(tmp_path / scratch_name("k", "a"), 2 * STALE), aged(tmp_path / scratch_name("k", "b"), 1)
    working = aged(tmp_path / scratch_name("k", "c"), 2 * STALE)
    (working / "00001" / "000004.train").write_bytes(b"")  # only what lies deep within is new
    other = aged(tmp_path / scratch_name("other", "a"), 2 * STALE)
    remove_stale(LocalFolder(str(tmp_path / "k")), tmp_path, "k")
    assert not gone.exists() and alive.exists() and working.exists() and other.exists()
    assert [line for line in lines if "its host did not come back" in line and str(gone) in line]
    remove_stale(LocalFolder(str(tmp_path / "k")), tmp_path / "none", "k")


def test_whoever_finds_the_rows_finished_cleans_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that was killed after it had written meta.json leaves the work folder as well."""
    cache = DataConfig(cache=str(tmp_path / "cache"), workers=1)
    text, folder = Text((source_of(write_text(tmp_path / "text", 1)),), "corpus"), LocalFolder(str(tmp_path / "rows"))
    tokens._build_once(folder, text, packing(), cache)
    rows = read_rows(tmp_path / "rows", "train")
    folder.write("parts/00000.claim", b"{}")
    gone = aged(tmp_path / "cache" / "tokens" / scratch_name("rows", "host2"), 2 * STALE)
    monkeypatch.setattr(tokens, "build", lambda *_: pytest.fail("built again"))
    tokens._build_once(folder, text, packing(), cache)
    assert not gone.exists() and not folder.names("parts")
    assert (read_rows(tmp_path / "rows", "train") == rows).all()


def test_rows_that_may_only_be_read_are_used_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = DataConfig(cache=str(tmp_path / "none"), workers=1)
    folder = LocalFolder(str(tmp_path / "rows"))
    folder.write("meta.json", b"{}")
    folder.write("parts/00000.claim", b"{}")

    def refused(name: str) -> None:
        raise PermissionError(13, "not yours", name)

    monkeypatch.setattr(folder, "remove", refused)
    text = Text((source_of(write_text(tmp_path / "text", 1)),), "corpus")
    tokens._build_once(folder, text, packing(), cache)
    assert not (tmp_path / "none").exists()  # no folder is made where nothing is to be built
