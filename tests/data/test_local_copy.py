"""Token caches copied to the node's own storage: the same sequences, copied once, never half a copy, clear refusals."""

import json
import os
import shutil
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest
from job import ROOT, Shelf, assert_same, results
from text import tokens_of
from tiny import all_of, changed
from transformers import PreTrainedTokenizerFast

from distill.config.settings import Config
from distill.data.local_copy import NOTE, local_copy
from distill.runtime.errors import SettingError

FILES = {"train": b"rows" * 5000, "heldout": b"", "meta.json": b"{}"}


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    folder = tmp_path / "shared" / "tokens" / "abc"
    folder.mkdir(parents=True)
    for name, content in FILES.items():
        (folder / name).write_bytes(content)
    return folder


def content(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.name != NOTE}


def inodes(folder: Path) -> dict[str, int]:
    return {file.name: file.stat().st_ino for file in folder.iterdir()}


def test_rows_are_those_of_the_cache(reviews: Config, words: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    local = changed(reviews, local=f"{tmp_path}/nvme")
    for part in ("train", "heldout"):
        copied, cached = tokens_of(local, words, part), tokens_of(reviews, words, part)
        np.testing.assert_array_equal(all_of(copied.sequences), all_of(cached.sequences))
        np.testing.assert_array_equal(copied.counts, cached.counts)
        assert (copied.digest, copied.name, copied.tokens) == (cached.digest, cached.name, cached.tokens)
        assert copied.sequences.folder.is_relative_to(tmp_path / "nvme")
        assert cached.sequences.folder.is_relative_to(tmp_path / "cache")


def test_it_is_copied_once_and_says_how_much_and_how_fast(cache: Path, tmp_path: Path, lines: list[str]) -> None:
    copy = local_copy(cache, f"{tmp_path}/nvme")
    assert content(copy) == FILES
    assert len(lines) == 2 and "copying 20,002 bytes" in lines[0]
    assert str(copy) in lines[1] and "20,002 bytes" in lines[1] and "MB a second" in lines[1]
    before = inodes(copy)
    assert local_copy(cache, f"{tmp_path}/nvme") == copy
    assert inodes(copy) == before and len(lines) == 3 and lines[2] == lines[1]


@pytest.mark.parametrize("damage", ["cut short", "too long", "a file is gone", "the note is gone", "only begun"])
def test_what_is_no_whole_copy_is_replaced(damage: str, cache: Path, tmp_path: Path) -> None:
    copy = local_copy(cache, f"{tmp_path}/nvme")
    if damage == "cut short":
        (copy / "train").write_bytes(FILES["train"][:-1])
    elif damage == "too long":
        (copy / "meta.json").write_bytes(b"{} ")
    elif damage == "a file is gone":
        (copy / "heldout").unlink()
    elif damage == "the note is gone":
        (copy / NOTE).unlink()
    else:
        unfinished = copy.rename(copy.with_name(f".{copy.name}.new"))
        (unfinished / "train").write_bytes(b"half")
    assert local_copy(cache, f"{tmp_path}/nvme") == copy
    assert content(copy) == FILES and not list(copy.parent.glob(".*.new"))


def test_a_mapped_copy_outlives_its_replacement(cache: Path, tmp_path: Path) -> None:
    """Another run may still be reading the copy that this one finds damaged."""
    copy = local_copy(cache, f"{tmp_path}/nvme")
    rows = np.memmap(copy / "train", np.uint8, "r")
    (copy / "heldout").unlink()
    local_copy(cache, f"{tmp_path}/nvme")
    assert bytes(rows) == FILES["train"]


def test_a_copy_that_was_killed_is_begun_anew(cache: Path, tmp_path: Path) -> None:
    """Killed in the middle: no lock stays, and what was there is not taken for a copy."""
    code = (
        "import os, shutil, signal, sys; from pathlib import Path; from distill.data.local_copy import local_copy\n"
        "def half(source, target):\n"
        "    Path(target).write_bytes(Path(source).read_bytes()[:9]); os.kill(os.getpid(), signal.SIGKILL)\n"
        "shutil.copyfile = half\n"
        "local_copy(Path(sys.argv[1]), sys.argv[2])\n"
    )
    killed = subprocess.run([sys.executable, "-c", code, str(cache), f"{tmp_path}/nvme"], cwd=ROOT, capture_output=True)
    assert killed.returncode == -9 and list((tmp_path / "nvme" / "copies").glob(".*.new/*"))
    copy = local_copy(cache, f"{tmp_path}/nvme")
    assert content(copy) == FILES and not list(copy.parent.glob(".*.new"))


def test_two_processes_at_once_copy_once(cache: Path, tmp_path: Path) -> None:
    code = (
        "import logging, sys; from pathlib import Path; from distill.data.local_copy import local_copy\n"
        "logging.basicConfig(stream=sys.stdout, level=logging.INFO, format='%(message)s')\n"
        "local_copy(Path(sys.argv[1]), sys.argv[2])\n"
    )
    command = [sys.executable, "-c", code, str(cache), f"{tmp_path}/nvme"]
    (cache / "train").write_bytes(bytes(64 << 20))
    pair = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    lines = [line for process in pair for line in process.communicate(timeout=120)[0].splitlines()]
    assert [process.returncode for process in pair] == [0, 0]
    assert sum("copying" in line for line in lines) == 1
    rates = [line for line in lines if "MB a second" in line]
    assert len(rates) == 2 and rates[0] == rates[1], "also the one that waited says how fast it was"


def test_no_room_is_refused_and_leaves_nothing(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**6, 10**6 - 999, 999))
    with pytest.raises(SettingError, match=r"^data\.local=.*nvme: .*999 bytes are free, 20,002 are needed.*make room"):
        local_copy(cache, f"{tmp_path}/nvme")
    assert not list((tmp_path / "nvme" / "copies").glob("abc*/"))


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_disk_that_fills_up_is_refused_and_leaves_nothing(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copyfile = shutil.copyfile

    def onto_a_full_disk(source: Path, target: Path) -> None:
        copyfile(source, "/dev/full" if source.name == "train" else target)

    monkeypatch.setattr(shutil, "copyfile", onto_a_full_disk)
    with pytest.raises(SettingError, match=r"^data\.local=.*No space left on device.*make room"):
        local_copy(cache, f"{tmp_path}/nvme")
    assert not list((tmp_path / "nvme" / "copies").glob("abc*/"))


def test_a_folder_that_cannot_be_written_is_refused(
    reviews: Config,
    words: PreTrainedTokenizerFast,
    tmp_path: Path,
) -> None:
    (tmp_path / "file").write_text("")
    for folder in (f"{tmp_path}/file", f"{tmp_path}/file/below", "/proc/nowhere"):
        with pytest.raises(SettingError, match=rf"^data\.local={folder} cannot be made .*give another folder"):
            tokens_of(changed(reviews, local=folder), words)


def test_the_run_and_its_identity_do_not_hang_on_it(shelf: Shelf) -> None:
    """Begun on one node's storage and gone on with on another's: the same run as without."""
    plain, moved = shelf.root / "all-in-one", shelf.root / "moved"
    assert shelf.run(plain, "train.epochs=1") == 0
    assert shelf.run(moved, "train.epochs=1", f"data.local={shelf.root / 'node1'}") == 0
    assert_same(plain, moved)
    of_moved, of_plain = results(moved), results(plain)
    assert of_moved["identity"] == of_plain["identity"] and "local" not in json.dumps(of_moved["identity"])
    assert of_moved["student"]["perplexity"] == of_plain["student"]["perplexity"]
    assert list((shelf.root / "node1" / "copies").glob("*/train-00000.rows"))
    # As if it had been killed before the report: the last steps are done again.
    (moved / "results.json").unlink()
    shutil.rmtree(sorted((moved / "checkpoints").iterdir())[-1])
    shutil.rmtree(moved / "student")
    assert shelf.run(moved, "train.epochs=1", f"data.local={shelf.root / 'node2'}") == 0
    assert_same(plain, moved)
    assert list((shelf.root / "node2" / "copies").glob("*/train-00000.rows"))
