"""Damage of prepared sequences: none is trained on, each is named, and what can be made again is made again."""

import pickle
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from text import tokens_of
from tiny import changed, parts
from transformers import PreTrainedTokenizerFast

from distill.config.settings import Config
from distill.data import tokens
from distill.data.new_tokenizer import wordpiece
from distill.data.tokens import Tokens, corpus_text, prepare
from distill.runtime.errors import Damaged, SettingError, StorageFailed

FILES = [f"{part}{end}" for part in ("train", "heldout") for end in ("-00000.bin", ".counts.npy")]
FILES.append("index.json")


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
    (index,) = Path(config.data.tokens or f"{config.data.cache}/tokens").glob("*/index.json")
    return index.parent


def content_of(found: Tokens) -> tuple[np.ndarray, np.ndarray, str]:
    """In memory, where damage of the files does not reach it."""
    return np.array(found.sequences[np.arange(len(found.sequences))]), np.array(found.counts), found.digest


def assert_same(found: Tokens, before: tuple[np.ndarray, np.ndarray, str]) -> None:
    sequences, counts, digest = content_of(found)
    np.testing.assert_array_equal(sequences, before[0])
    np.testing.assert_array_equal(counts, before[1])
    assert digest == before[2]


def is_found_in_reading(file: str, name: str) -> bool:
    """Damage of sequences that leaves the size of their file is found when they are first read."""
    return file.endswith(".bin") and name.startswith(("zeros", "a flipped bit"))


@pytest.mark.parametrize("name", DAMAGES)
@pytest.mark.parametrize("file", FILES)
def test_what_is_damaged_in_the_cache_is_made_again(
    file: str, name: str, reviews: Config, words: PreTrainedTokenizerFast, lines: list[str]
) -> None:
    part = "heldout" if file.startswith("heldout") else "train"
    before = content_of(tokens_of(reviews, words, part))
    path = folder_of(reviews) / file
    damage(path, name)
    lines.clear()
    if is_found_in_reading(file, name):
        with pytest.raises(StorageFailed, match=rf"^{path} is damaged \(.*the same command makes it again and resumes"):
            content_of(tokens_of(reviews, words, part))
        assert lines == []
    assert_same(tokens_of(reviews, words, part), before)
    named = [line for line in lines if f"{path} is damaged (" in line and "made again" in line]
    assert len(named) == 1 or (file, name) == ("index.json", "gone"), lines  # which was never finished
    lines.clear()
    assert_same(tokens_of(reviews, words, part), before)
    assert lines == []
    assert not list(path.parent.parent.glob("damaged-*"))


@pytest.mark.parametrize("name", DAMAGES)
@pytest.mark.parametrize("file", FILES)
def test_what_is_damaged_in_a_shared_folder_is_refused(
    file: str, name: str, reviews: Config, words: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    shared = changed(reviews, tokens=f"{tmp_path}/shared")
    part = "heldout" if file.startswith("heldout") else "train"
    before = content_of(tokens_of(shared, words, part))
    path = folder_of(shared) / file
    content = path.read_bytes()
    damage(path, name)
    if (file, name) == ("index.json", "gone"):  # it was never finished
        assert_same(tokens_of(shared, words, part), before)
        return
    place = "" if is_found_in_reading(file, name) else rf"data\.tokens={tmp_path}/shared: "
    with pytest.raises(
        (SettingError, StorageFailed), match=rf"^{place}{path} is damaged \(.*restore.*delete its folder"
    ):
        content_of(tokens_of(shared, words, part))
    path.write_bytes(content)
    assert_same(tokens_of(shared, words, part), before)


def test_strict_reads_all_files_and_stops_at_damage(reviews: Config, words: PreTrainedTokenizerFast) -> None:
    def strict(part: str) -> Tokens:
        return prepare(corpus_text(*parts(reviews)), words, *parts(reviews), part, recheck=True)

    strict("train")
    path = folder_of(reviews) / "heldout-00000.bin"
    damage(path, "a flipped bit")
    refused = rf"^data\.cache=.*{re.escape(str(path))} is damaged \(.*or set resume=auto"
    with pytest.raises(SettingError, match=refused):
        strict("train")
    assert path.exists()


def test_finished_sequences_need_no_cache_that_can_be_written(
    reviews: Config, words: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    shared = changed(reviews, tokens=f"{tmp_path}/shared")
    before = content_of(tokens_of(shared, words))
    (tmp_path / "file").write_bytes(b"")
    assert_same(tokens_of(changed(shared, cache=f"{tmp_path}/file/cache"), words), before)


def test_a_disk_that_damages_whatever_is_written_is_named(
    reviews: Config, words: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch, lines: list[str]
) -> None:
    check = tokens.check_files

    def never(path: Path, *_: object, in_full: bool) -> None:
        raise Damaged(path / "train-00000.bin", "it is missing")

    monkeypatch.setattr(tokens, "check_files", never)
    with pytest.raises(SettingError, match=r"^data\.cache=.*bin is damaged \(.*delete its folder"):
        tokens_of(reviews, words)
    monkeypatch.setattr(tokens, "check_files", check)
    assert sum("made again" in line for line in lines) == 1
    assert not list(folder_of(reviews).parent.glob("damaged-*"))


# --- single files of the cache


@pytest.mark.parametrize("name", DAMAGES)
def test_a_trained_tokenizer_that_is_damaged_is_trained_again(name: str, reviews: Config, lines: list[str]) -> None:
    given = parts(changed(reviews, vocab_size=300))
    before = wordpiece(*given).backend_tokenizer.to_str()
    (path,) = (Path(reviews.data.cache) / "wordpiece").glob("*.json")
    damage(path, name)
    lines.clear()
    assert wordpiece(*given).backend_tokenizer.to_str() == before
    assert sum(f"{path} is damaged" in line for line in lines) == (name != "gone")
    assert any("training a tokenizer" in line for line in lines)
    lines.clear()
    assert wordpiece(*given).backend_tokenizer.to_str() == before and lines == []


@pytest.mark.parametrize("content", [None, b"", b"{", b"[]", b"null", bytes(5000)])
def test_a_tokenizer_without_its_digest_is_trained_again(
    content: bytes | None, reviews: Config, lines: list[str]
) -> None:
    given = parts(changed(reviews, vocab_size=300))
    before = wordpiece(*given).backend_tokenizer.to_str()
    (path,) = (Path(reviews.data.cache) / "wordpiece").glob("*.json")
    path.with_name(f"{path.name}.sha256").unlink()
    if content is not None:
        path.write_bytes(content)
    lines.clear()
    assert wordpiece(*given).backend_tokenizer.to_str() == before
    assert sum(f"{path} is damaged" in line for line in lines) == 1
    lines.clear()
    assert wordpiece(*given).backend_tokenizer.to_str() == before and lines == []


@pytest.mark.parametrize("place", [Path("/a/b"), "s3://bucket/a"])
def test_damage_is_sent_between_processes(place: Path | str) -> None:
    received = pickle.loads(pickle.dumps(Damaged(place, "it is missing")))
    assert isinstance(received, Damaged) and str(received) == f"{place} is damaged (it is missing)"


def test_processes_that_find_the_same_damage_make_the_sequences_again_once(
    reviews: Config, words: PreTrainedTokenizerFast, lines: list[str]
) -> None:
    """None removes what another one has begun to make again."""
    before = content_of(tokens_of(reviews, words))
    damage(folder_of(reviews) / "train-00000.bin", "cut")
    lines.clear()
    with ThreadPoolExecutor() as pool:
        found = [pool.submit(tokens_of, reviews, words) for _ in range(4)]
    for each in found:
        assert_same(each.result(), before)
    assert sum("made again" in line for line in lines) == sum("preparing tokens" in line for line in lines) == 1
