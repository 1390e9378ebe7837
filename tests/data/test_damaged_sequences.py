"""Damage of prepared sequences: none is trained on, each is named, and what can be made again is made again."""

import os
import pickle
import re
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from text import tokens_of
from tiny import changed, parts
from transformers import PreTrainedTokenizerFast

from distill.config.data import Duplicates
from distill.config.settings import Config
from distill.data import build_tokens
from distill.data.shards import check, host
from distill.data.tokens import Tokens, corpus_text, prepare
from distill.data.wordpiece import corpus_tokenizer
from distill.runtime.errors import Damaged, SettingError

FILES = [f"{part}{end}" for part in ("train", "heldout") for end in ("-00000.rows", ".index", ".counts.npy")]
FILES.append("meta.json")


def flipped(content: bytes, at: int) -> bytes:
    return content[:at] + bytes([content[at] ^ 4]) + content[at + 1 :]


DAMAGES: dict[str, Callable[[bytes], bytes | None]] = {
    "zeros": lambda content: bytes(len(content)),
    "zeros in the middle": lambda content: (
        content[: len(content) // 3]
        + bytes(min(4096, len(content) // 3))
        + content[len(content) // 3 + min(4096, len(content) // 3) :]
    ),
    "cut": lambda content: content[: len(content) // 2],
    "empty": lambda content: b"",
    "longer": lambda content: content + b"x",
    "gone": lambda content: None,
    "a flipped bit at the front": lambda content: flipped(content, 3),
    "a flipped bit": lambda content: flipped(content, len(content) // 2),
    "a flipped bit at the end": lambda content: flipped(content, len(content) - 3),
    "another file": lambda content: b'{"train": [1], "heldout": 2}',
}


def damage(path: Path, name: str) -> None:
    content = DAMAGES[name](path.read_bytes())
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content)


def folder_of(config: Config) -> Path:
    (meta,) = Path(config.data.tokens or f"{config.data.cache}/tokens").glob("*/meta.json")
    return meta.parent


def content_of(tokens: Tokens) -> tuple[np.ndarray, np.ndarray, str]:
    """In memory, where damage of the files does not reach it."""
    return np.array(tokens.sequences[np.arange(len(tokens.sequences))]), np.array(tokens.counts), tokens.digest


def assert_same(tokens: Tokens, before: tuple[np.ndarray, np.ndarray, str]) -> None:
    sequences, counts, digest = content_of(tokens)
    np.testing.assert_array_equal(sequences, before[0])
    np.testing.assert_array_equal(counts, before[1])
    assert digest == before[2]


@pytest.mark.parametrize("name", DAMAGES)
@pytest.mark.parametrize("file", FILES)
def test_what_is_damaged_in_the_cache_is_made_again(
    file: str, name: str, reviews: Config, words: PreTrainedTokenizerFast, lines: list[str]
) -> None:
    before = content_of(tokens_of(reviews, words))
    damage(folder_of(reviews) / file, name)
    lines.clear()
    assert_same(tokens_of(reviews, words), before)
    named = [line for line in lines if f"{folder_of(reviews) / file} is damaged (" in line and "made again" in line]
    assert len(named) == 1 or (file, name) == ("meta.json", "gone"), lines  # which was never finished
    assert any("preparing tokens" in line for line in lines)
    lines.clear()
    assert_same(tokens_of(reviews, words), before)
    assert lines == []


SHARED = [(file, None) for file in FILES] + [(f"{part}-00000.rows.zst", "zstd") for part in ("train", "heldout")]


@pytest.mark.parametrize("name", DAMAGES)
@pytest.mark.parametrize(("file", "compression"), SHARED)
def test_what_is_damaged_in_a_shared_folder_is_refused(
    file: str, compression: str | None, name: str, reviews: Config, words: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    shared = changed(reviews, tokens=f"{tmp_path}/shared", compression=compression)
    before = content_of(tokens_of(shared, words))
    path = folder_of(shared) / file
    content = path.read_bytes()
    damage(path, name)
    if (file, name) == ("meta.json", "gone"):  # it was never finished
        assert_same(tokens_of(shared, words), before)
        return
    refused = rf"^data\.tokens={tmp_path}/shared: {path} is damaged \(.*\): restore that file, or delete its folder"
    for part in ("train", "heldout"):  # neither is used from a folder of which a file is damaged
        with pytest.raises(SettingError, match=refused):
            tokens_of(shared, words, part)
    path.write_bytes(content)
    assert_same(tokens_of(shared, words), before)


def test_of_a_folder_that_is_read_in_blocks_only_sizes_are_checked(
    reviews: Config, words: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    shared = changed(reviews, tokens=f"{tmp_path}/shared", compression="zstd")
    blocks = shared.changed(data=shared.data.changed(local_bytes=9000, shuffle_bytes=4000))
    tokens_of(blocks, words)
    path = folder_of(blocks) / "train-00000.rows.zst"
    content = path.read_bytes()
    damage(path, "zeros")
    tokens_of(blocks, words)  # whoever reads a block finds it: tests/data/test_block_store.py
    for name in ("cut", "gone"):
        path.write_bytes(content)
        damage(path, name)
        with pytest.raises(SettingError, match=rf"{path} is damaged"):
            tokens_of(blocks, words)


# --- when it is read, and when a stamp has to do


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The folders whose files are read in full, as that happens."""
    found: list[Path] = []
    check_files = check.check_files

    def noted(folder, data, in_full=True):  # type: ignore[no-untyped-def]
        found.extend([folder.folder] * in_full)
        check_files(folder, data, in_full)

    monkeypatch.setattr(check, "check_files", noted)
    return found


def test_files_are_read_once(
    reviews: Config, words: PreTrainedTokenizerFast, reads: list[Path], tmp_path: Path
) -> None:
    for part in ("train", "heldout", "train"):
        tokens_of(reviews, words, part)
    assert reads == [folder_of(reviews)]
    os.utime(folder_of(reviews) / "train-00000.rows", (1, 1))
    tokens_of(reviews, words)
    assert len(reads) == 2
    folder = folder_of(reviews)
    status = (folder / "train.index").stat()
    (folder / "other").write_bytes((folder / "train.index").read_bytes())  # of another inode
    os.utime(folder / "other", ns=(status.st_atime_ns, status.st_mtime_ns))
    (folder / "other").replace(folder / "train.index")
    tokens_of(reviews, words)
    assert len(reads) == 3
    (stamp,) = [path for path in (tmp_path / "cache" / "checked").iterdir() if path.suffix != ".lock"]
    for content in (b"", b"[]", b"{}", stamp.read_bytes()[:40]):  # a damaged stamp shows nothing
        stamp.write_bytes(content)
        tokens_of(reviews, words)
    assert len(reads) == 7
    tokens_of(reviews, words)
    assert len(reads) == 7


def test_strict_reads_again_in_each_run_and_stops_at_damage(
    reviews: Config, words: PreTrainedTokenizerFast, reads: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def strict(part: str) -> Tokens:
        return prepare(corpus_text(*parts(reviews)), words, *parts(reviews), part, recheck=True)

    tokens_of(reviews, words)
    assert len(reads) == 1
    monkeypatch.setattr(check, "BEGAN", time.monotonic() + 0.01)  # as in a later process
    time.sleep(0.05)
    tokens_of(reviews, words)
    assert len(reads) == 1
    strict("train")
    strict("heldout")
    assert len(reads) == 2
    path = folder_of(reviews) / "train-00000.rows"
    status = path.stat()
    damage(path, "a flipped bit")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))  # as of a disk that fails
    tokens_of(reviews, words)  # the price of a stamp
    monkeypatch.setattr(check, "BEGAN", time.monotonic() + 0.01)
    refused = rf"^data\.cache=.*{re.escape(str(path))} is damaged \(its .* bytes from 0 on.*or set resume=auto"
    with pytest.raises(SettingError, match=refused):
        strict("train")


def test_a_cache_that_may_only_be_read_is_checked_each_time(
    reviews: Config, words: PreTrainedTokenizerFast, reads: list[Path], tmp_path: Path
) -> None:
    shared = changed(reviews, tokens=f"{tmp_path}/shared")
    tokens_of(shared, words)
    (tmp_path / "file").write_bytes(b"")
    no_cache = changed(shared, cache=f"{tmp_path}/file/cache")
    for _ in range(2):
        tokens_of(no_cache, words)
    assert len(reads) == 3


def test_a_disk_that_damages_whatever_is_written_is_named(
    reviews: Config, words: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch, lines: list[str]
) -> None:
    monkeypatch.setattr(check, "_is_whole", lambda *_: False)
    with pytest.raises(SettingError, match=r"^data\.cache=.*rows is damaged \(.*delete its folder"):
        tokens_of(reviews, words)
    assert sum("made again" in line for line in lines) == 1
    assert not list(folder_of(reviews).parent.glob("damaged-*"))


# --- single files of the cache


@pytest.mark.parametrize("name", DAMAGES)
def test_a_trained_tokenizer_that_is_damaged_is_trained_again(name: str, reviews: Config, lines: list[str]) -> None:
    given = parts(changed(reviews, vocab_size=300))
    before = corpus_tokenizer(*given).backend_tokenizer.to_str()
    (path,) = (Path(reviews.data.cache) / "wordpiece").glob("*.json")
    damage(path, name)
    lines.clear()
    assert corpus_tokenizer(*given).backend_tokenizer.to_str() == before
    assert sum(f"{path} is damaged" in line for line in lines) == (name != "gone")
    assert any("training a tokenizer" in line for line in lines)
    lines.clear()
    assert corpus_tokenizer(*given).backend_tokenizer.to_str() == before and lines == []


@pytest.mark.parametrize("content", [None, b"", b"{", b"[]", b"null", bytes(5000)])
def test_a_tokenizer_without_its_digest_is_trained_again(
    content: bytes | None, reviews: Config, lines: list[str]
) -> None:
    given = parts(changed(reviews, vocab_size=300))
    before = corpus_tokenizer(*given).backend_tokenizer.to_str()
    (path,) = (Path(reviews.data.cache) / "wordpiece").glob("*.json")
    path.with_name(f"{path.name}.sha256").unlink()
    if content is not None:
        path.write_bytes(content)
    lines.clear()
    assert corpus_tokenizer(*given).backend_tokenizer.to_str() == before
    assert sum(f"{path} is damaged" in line for line in lines) == 1
    lines.clear()
    assert corpus_tokenizer(*given).backend_tokenizer.to_str() == before and lines == []


# --- a preparation that was cut short, on a machine that lost power


class Cut(Exception):
    """The process ends here."""


def cut_short(config: Config, words: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """All groups are published, and nothing is put together yet; the folder of the work, and that of the host."""

    def end(*_: object) -> None:
        raise Cut

    with monkeypatch.context() as patched:
        patched.setattr(build_tokens, "finish", end)
        with pytest.raises(Cut):
            tokens_of(config, words)
    (work,) = (Path(config.data.cache) / "tokens").glob("*/parts")
    (scratch,) = (Path(config.data.cache) / "tokens").glob("*.build")
    return work, scratch


@pytest.mark.parametrize("name", ["zeros", "cut", "empty"])
@pytest.mark.parametrize("file", ["plan.json", "00000.json", "00000.train.counts.npy", "00000.digests.npy"])
def test_what_a_power_loss_tears_in_an_unfinished_preparation_is_made_anew(
    file: str, name: str, reviews: Config, words: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch,
    lines: list[str], tmp_path: Path,
) -> None:  # fmt: skip
    counting = changed(reviews, duplicates=Duplicates.count)
    before = content_of(tokens_of(changed(counting, cache=f"{tmp_path}/other"), words))
    work, _ = cut_short(counting, words, monkeypatch)
    damage(work / file, name)
    lines.clear()
    assert_same(tokens_of(counting, words), before)
    assert sum(f"{work / file} is damaged" in line and "begun anew" in line for line in lines) == 1


def test_units_that_a_power_loss_tears_are_packed_again(
    reviews: Config, words: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    before = content_of(tokens_of(changed(reviews, cache=f"{tmp_path}/other"), words))

    def end(*_: object) -> None:
        raise Cut

    with monkeypatch.context() as patched:
        patched.setattr(host, "publish", end)
        with pytest.raises(Cut):
            tokens_of(reviews, words)
    (unit,) = (Path(reviews.data.cache) / "tokens").glob("*.build/*/*.train")
    for path, name in ((unit, "zeros"), (unit, "cut"), (unit.with_suffix(".json"), "another file")):
        damage(path, name)
        with monkeypatch.context() as patched:
            patched.setattr(host, "publish", end)
            with pytest.raises(Cut):
                tokens_of(reviews, words)
    damage(unit, "zeros")
    assert_same(tokens_of(reviews, words), before)


@pytest.mark.parametrize("place", [Path("/a/b"), "s3://bucket/a"])
def test_damage_is_sent_between_processes(place: Path | str) -> None:
    received = pickle.loads(pickle.dumps(Damaged(place, "it is missing")))
    assert isinstance(received, Damaged) and str(received) == f"{place} is damaged (it is missing)"
