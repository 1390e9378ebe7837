"""Fixtures of the tests of data: a tokenizer trained on made-up words, and a corpus of them."""

from pathlib import Path

import pytest
from reading import write_lines
from text import some_text
from tiny import parts, text_config
from transformers import PreTrainedTokenizerFast

from distill.config.settings import Config
from distill.data.new_tokenizer import wordpiece
from distill.data.sources import _files


@pytest.fixture(scope="session")
def words(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerFast:
    folder = tmp_path_factory.mktemp("tokenizer")
    (folder / "a.txt").write_text(some_text(0, 4000))
    return wordpiece(*parts(text_config(kind="text", path=str(folder), vocab_size=300, cache=str(folder / "cache"))))


@pytest.fixture
def reviews(tmp_path: Path) -> Config:
    """60 documents of 1 to 400 words in two JSONL files; rows of 32; work in this process."""
    for name, seeds in (("a", range(40)), ("b", range(40, 60))):
        rows = ({"text": some_text(seed, 1 + seed * seed % 400)} for seed in seeds)
        write_lines(tmp_path / "reviews" / f"{name}.jsonl", rows)
    given = {"sequence_length": 32, "cache": str(tmp_path / "cache"), "workers": 1, "heldout": 0.2}
    return text_config(kind="jsonl", path=str(tmp_path / "reviews"), **given)


@pytest.fixture
def small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every file is a unit of work, and may be a shard."""
    monkeypatch.setattr(_files, "SHARD_BYTES", 1)
