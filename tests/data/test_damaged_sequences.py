"""Damage of prepared sequences: none is trained on, each is named, and what is deleted is made again."""

import pickle
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from text import tokens_of
from tiny import changed, parts
from transformers import PreTrainedTokenizerFast

from distill.config.settings import Config
from distill.data.new_tokenizer import wordpiece
from distill.data.tokens import Tokens
from distill.runtime.errors import Damaged, SettingError, StorageFailed


def flipped(content: bytes, at: int) -> bytes:
    return content[:at] + bytes([content[at] ^ 4]) + content[at + 1 :]


DAMAGES: dict[str, Callable[[bytes], bytes | None]] = {
    "zeros": lambda content: bytes(len(content)),
    "cut": lambda content: content[: len(content) // 2],
    "longer": lambda content: content + b"x",
    "gone": lambda content: None,
    "a flipped bit at the front": lambda content: flipped(content, 3),
    "a flipped bit": lambda content: flipped(content, len(content) // 2),
    "a flipped bit at the end": lambda content: flipped(content, len(content) - 3),
    "another file": lambda content: b'{"train": [1], "heldout": 2}',
}


def damage(path: Path, name: str) -> None:
    content = DAMAGES[name](path.read_bytes())
    path.unlink() if content is None else path.write_bytes(content)


def folder_of(config: Config) -> Path:
    (index,) = Path(config.data.tokens or f"{config.data.cache}/tokens").glob("*/index.json")
    return index.parent


def content_of(found: Tokens) -> tuple[bytes, bytes, str]:
    """In memory, where damage of the files does not reach it."""
    return found.sequences[np.arange(len(found.sequences))].tobytes(), found.counts.tobytes(), found.digest


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("name", DAMAGES)
@pytest.mark.parametrize("file", ["train-00000.bin", "heldout-00000.bin", "index.json"])
def test_what_is_damaged_is_named_and_made_again_once_it_is_deleted(
    file: str, name: str, shared: bool, reviews: Config, words: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    config = changed(reviews, tokens=f"{tmp_path}/shared") if shared else reviews
    part = "heldout" if file.startswith("heldout") else "train"
    before = content_of(tokens_of(config, words, part))
    path = folder_of(config) / file
    content = path.read_bytes()
    damage(path, name)
    if (file, name) != ("index.json", "gone"):  # it was never finished
        place = rf"data\.tokens={tmp_path}/shared: " if shared else r"data\.cache=.*: "
        named = rf"^({place})?{path} (is damaged|cannot be read) ?\(.*restore that file, or delete its folder"
        for _ in range(2):
            with pytest.raises((SettingError, StorageFailed), match=named):
                content_of(tokens_of(config, words, part))
        path.write_bytes(content)
        assert content_of(tokens_of(config, words, part)) == before
        shutil.rmtree(path.parent)
    assert content_of(tokens_of(config, words, part)) == before


def test_finished_sequences_need_no_cache_that_can_be_written(
    reviews: Config, words: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    shared = changed(reviews, tokens=f"{tmp_path}/shared")
    before = content_of(tokens_of(shared, words))
    (tmp_path / "file").write_bytes(b"")
    assert content_of(tokens_of(changed(shared, cache=f"{tmp_path}/file/cache"), words)) == before


@pytest.mark.parametrize("name", [*DAMAGES, "no digest"])
def test_a_trained_tokenizer_that_is_damaged_is_trained_again(name: str, reviews: Config, lines: list[str]) -> None:
    given = parts(changed(reviews, vocab_size=300))
    before = wordpiece(*given).backend_tokenizer.to_str()
    (path,) = (Path(reviews.data.cache) / "wordpiece").glob("*.json")
    damage(path, name) if name in DAMAGES else path.with_name(f"{path.name}.sha256").unlink()
    lines.clear()
    assert wordpiece(*given).backend_tokenizer.to_str() == before
    assert sum(f"{path} is damaged" in line for line in lines) == (name != "gone")
    assert any("training a tokenizer" in line for line in lines)
    lines.clear()
    assert wordpiece(*given).backend_tokenizer.to_str() == before and lines == []


@pytest.mark.parametrize("place", [Path("/a/b"), "s3://bucket/a"])
def test_damage_is_sent_between_processes(place: Path | str) -> None:
    received = pickle.loads(pickle.dumps(Damaged(place, "it is missing")))
    assert isinstance(received, Damaged) and str(received) == f"{place} is damaged (it is missing)"


def test_processes_that_want_the_same_sequences_make_them_once(
    reviews: Config, words: PreTrainedTokenizerFast, lines: list[str]
) -> None:
    with ThreadPoolExecutor() as pool:
        found = [pool.submit(tokens_of, reviews, words) for _ in range(4)]
    assert len({content_of(each.result()) for each in found}) == 1
    assert sum("preparing tokens" in line for line in lines) == 1
