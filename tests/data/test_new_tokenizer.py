"""Tokenizers of one's own: the same every time, with the commonest letters, and any text comes back from bytes."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from job import ROOT
from text import some_text
from tiny import changed, parts, text_config
from transformers import AutoTokenizer

from distill.config.settings import Config
from distill.data import new_tokenizer
from distill.data.new_tokenizer import END, byte_bpe, wordpiece
from distill.runtime.errors import SettingError

CODE = """
import sys
sys.path.append('tests')
from tiny import parts, text_config
from distill.data import new_tokenizer
name, path, cache = sys.argv[1:]
given = {'kind': 'jsonl', 'path': path, 'cache': cache, 'vocab_size': 400, 'heldout': 0.2, 'workers': 1}
getattr(new_tokenizer, name)(*parts(text_config(**given)))
"""


def config_of(tmp_path: Path, text: str, **more: Any) -> Config:
    (tmp_path / "a.txt").write_text(text)
    given = {"kind": "text", "path": f"{tmp_path}/a.txt", "heldout": 0.0, "workers": 1, "cache": str(tmp_path)}
    return text_config(**given, **more)


@pytest.mark.parametrize("name", ["wordpiece", "byte_bpe"])
def test_it_is_the_same_in_every_process_and_survives_saving(
    name: str, reviews: Config, tmp_path: Path, lines: list[str]
) -> None:
    made = []
    for cache in ("one", "two"):  # the order in a hash map changes with the process
        arguments = [name, str(reviews.corpus.path), f"{tmp_path}/{cache}"]
        subprocess.run([sys.executable, "-c", CODE, *arguments], cwd=ROOT, check=True)
        (file,) = (tmp_path / cache).glob(f"{name}/*.json")
        made.append(file.read_text())
        assert {path.suffix for path in file.parent.iterdir()} == {".json", ".sha256"}
    assert made[0] == made[1]
    tokenizer = getattr(new_tokenizer, name)(*parts(changed(reviews, vocab_size=400, cache=f"{tmp_path}/one")))
    assert not lines and 200 < len(tokenizer) <= 400
    tokenizer.save_pretrained(tmp_path / "saved")
    loaded = AutoTokenizer.from_pretrained(tmp_path / "saved")
    if name == "wordpiece":
        assert loaded.convert_tokens_to_ids(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]) == [0, 1, 2, 3, 4]
        assert loaded.decode(loaded("Ban DAN fart [MASK].")["input_ids"]) == "[CLS] ban dan fart [MASK]. [SEP]"
        assert loaded.mask_token_id == 4 and loaded("x~")["input_ids"].count(1) == 2
    else:
        assert loaded.eos_token_id == loaded.bos_token_id == loaded(f"Ban{END}")["input_ids"][-1] == 0
        assert len(loaded("ban dan fart")["input_ids"]) < len("ban dan fart"), "no merge was learned"


def test_wordpiece_keeps_the_commonest_letters_of_many(tmp_path: Path) -> None:
    rare = "".join(map(chr, range(0x4E00, 0x5000)))
    config = config_of(tmp_path, "\n\n".join([some_text(3, 3000), rare, some_text(4, 3000)]), vocab_size=300)
    tokenizer = wordpiece(*parts(config))
    assert len(tokenizer) == 300 and {"b", "a", "##a"} <= set(tokenizer.get_vocab())


TEXTS = [
    "Plain words, and  two spaces; a tab\tand an end . ",
    "one\r\ntwo\r\n\r\nthree\n",
    "東京 Ελλάδα עברית “quoted” don't",
    "👩\u200d👩\u200d👧 🇨🇭 e\u0301 \u00e9 \ufeff \x00 \x7f",
]


@pytest.mark.parametrize("text", TEXTS)
def test_any_text_comes_back_from_its_ids(text: str, tmp_path: Path) -> None:
    tokenizer = byte_bpe(*parts(config_of(tmp_path, some_text(3, 2000), vocab_size=320)))
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text and 0 not in ids


@pytest.mark.parametrize(("train", "least"), [(wordpiece, 100), (byte_bpe, 300)])
def test_what_cannot_be_trained_is_refused(train: Any, least: int, tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"^corpus\.path"):
        train(*parts(config_of(tmp_path, " \n", vocab_size=300)))
    with pytest.raises(SettingError, match=rf"^corpus\.vocab_size={least - 1}: "):
        train(*parts(config_of(tmp_path, some_text(3, 200), vocab_size=least - 1)))
