"""Fixtures of the tests of data: a tokenizer trained on made-up words, and a corpus of them."""

import json
from pathlib import Path

import pytest
from text import some_text
from tiny import parts, text_config
from transformers import PreTrainedTokenizerFast

from distill.config.settings import Config
from distill.data.new_tokenizer import wordpiece


@pytest.fixture(scope="session")
def words(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerFast:
    folder = tmp_path_factory.mktemp("tokenizer")
    (folder / "a.txt").write_text(some_text(0, 4000))
    return wordpiece(*parts(text_config(kind="text", path=str(folder), vocab_size=300, cache=str(folder / "cache"))))


@pytest.fixture
def reviews(tmp_path: Path) -> Config:
    """60 documents of 1 to 400 words in two JSONL files; rows of 32; work in this process."""
    folder = tmp_path / "reviews"
    folder.mkdir()
    for name, seeds in (("a", range(40)), ("b", range(40, 60))):
        lines = [json.dumps({"text": some_text(seed, 1 + seed * seed % 400)}) for seed in seeds]
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
    return text_config(
        kind="jsonl", path=str(folder), sequence_length=32, cache=str(tmp_path / "cache"), workers=1, heldout=0.2
    )
