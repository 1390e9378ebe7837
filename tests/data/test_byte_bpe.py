"""A byte-level tokenizer of one's own: the same every time, and any text comes back from its ids."""

import subprocess
import sys
from pathlib import Path

import pytest
from job import ROOT
from text import some_text
from tiny import changed, parts, text_config
from transformers import AutoTokenizer

from distill.config.settings import Config
from distill.data.byte_bpe import END, corpus_tokenizer
from distill.runtime.errors import SettingError

CODE = """
import sys
sys.path.append('tests')
from tiny import parts, text_config
from distill.data.byte_bpe import corpus_tokenizer
path, cache = sys.argv[1:]
corpus_tokenizer(*parts(text_config(kind='jsonl', path=path, cache=cache, vocab_size=400, heldout=0.2, workers=1)))
"""


def test_it_is_the_same_in_every_process_and_survives_saving(reviews: Config, tmp_path: Path) -> None:
    made = []
    for name in ("one", "two"):  # the order in a hash map changes with the process
        arguments = [str(reviews.corpus.path), f"{tmp_path}/{name}"]
        subprocess.run([sys.executable, "-c", CODE, *arguments], cwd=ROOT, check=True)
        (file,) = (tmp_path / name).glob("byte_bpe/*.json")
        made.append(file.read_text())
        assert {path.suffix for path in file.parent.iterdir()} == {".json", ".sha256"}
    assert made[0] == made[1]
    tokenizer = corpus_tokenizer(*parts(changed(reviews, vocab_size=400, cache=f"{tmp_path}/one")))
    assert len(tokenizer) == 400 and tokenizer.eos_token_id == tokenizer.bos_token_id == 0
    assert len(tokenizer("ban dan fart")["input_ids"]) < len("ban dan fart"), "no merge was learned"
    tokenizer.save_pretrained(tmp_path / "saved")
    loaded = AutoTokenizer.from_pretrained(tmp_path / "saved")
    text = f"Ban DAN fart.{END}"
    assert loaded(text)["input_ids"] == tokenizer(text)["input_ids"] and loaded(text)["input_ids"][-1] == 0


TEXTS = [
    "Plain words, and  two spaces; a tab\tand an end . ",
    "one\r\ntwo\r\n\r\nthree\n",
    "naïve café — “quoted” don't , can 't",
    "東京 Ελλάδα עברית",
    "👩\u200d👩\u200d👧 🇨🇭 e\u0301 \u00e9 \ufeff \x00 \x7f",
]


@pytest.mark.parametrize("text", TEXTS)
def test_any_text_comes_back_from_its_ids(text: str, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(some_text(3, 2000))
    given = {"kind": "text", "path": f"{tmp_path}/a.txt", "heldout": 0.0, "workers": 1, "cache": str(tmp_path)}
    tokenizer = corpus_tokenizer(*parts(text_config(**given, vocab_size=320)))
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text and 0 not in ids


def test_what_cannot_be_trained_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(some_text(3, 200))
    given = {"kind": "text", "path": f"{tmp_path}/a.txt", "heldout": 0.0, "workers": 1, "cache": str(tmp_path)}
    with pytest.raises(SettingError, match=r"^corpus\.vocab_size=299: .* from 300 up to 4,000,000$"):
        corpus_tokenizer(*parts(text_config(**given, vocab_size=299)))
    (tmp_path / "a.txt").write_text(" \n")
    with pytest.raises(SettingError, match=r"^corpus\.path"):
        corpus_tokenizer(*parts(text_config(**given, vocab_size=300)))
