"""A tokenizer splits text as its tokenizer.json says, also where transformers rebuilds it from the vocabulary alone."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, GPT2Tokenizer, PreTrainedTokenizerFast
from vocabularies import END, byte_pieces

from distill.models.kind import CAUSAL
from distill.models.load import load_tokenizer


def byte_level(folder: Path, digits: bool) -> Path:
    """A saved tokenizer that merges 1 and 2 to 12 unless it keeps digits apart; its folder names GPT-2's class."""
    vocabulary = byte_pieces([END])
    vocabulary["12"] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocabulary, [("1", "2")]))
    steps = [pre_tokenizers.Digits(individual_digits=True)] if digits else []
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*steps, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, bos_token=END).save_pretrained(folder)
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"tokenizer_class": "GPT2Tokenizer"}))
    return folder


def test_digits_stay_apart_where_the_file_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = byte_level(tmp_path, digits=True)
    assert AutoTokenizer.from_pretrained(folder).tokenize("12") == ["12"], "transformers takes the vocabulary alone"
    with caplog.at_level("INFO"):
        tokenizer = load_tokenizer("teacher.path", str(folder), CAUSAL)
    assert tokenizer.tokenize("12") == ["1", "2"] and tokenizer.eos_token == END
    assert f"teacher.path={folder}: text is split as its tokenizer.json says" in caplog.text
    tokenizer.save_pretrained(tmp_path / "student")
    assert AutoTokenizer.from_pretrained(tmp_path / "student").tokenize("12") == ["1", "2"]


def test_a_class_that_splits_as_the_file_is_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        tokenizer = load_tokenizer("teacher.path", str(byte_level(tmp_path, digits=False)), CAUSAL)
    assert isinstance(tokenizer, GPT2Tokenizer) and tokenizer.tokenize("12") == ["12"]
    assert "tokenizer.json" not in caplog.text
