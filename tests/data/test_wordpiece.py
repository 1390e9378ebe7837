"""A tokenizer of one's own: the same every time, and with the commonest letters."""

import subprocess
import sys
from pathlib import Path

import pytest
from job import ROOT
from text import some_text
from tiny import changed, parts, text_config
from transformers import AutoTokenizer

from distill.config.settings import Config
from distill.data.wordpiece import corpus_tokenizer
from distill.runtime.errors import SettingError

# --- a tokenizer of one's own


def test_wordpiece_is_the_same_every_time_and_survives_saving(
    reviews: Config, tmp_path: Path, lines: list[str]
) -> None:
    made = []
    for name in ("one", "two"):  # in processes of their own, since the order in a hash map changes with the process
        code = (
            "import sys\nsys.path.append('tests')\nfrom tiny import parts, text_config\n"
            "from distill.data.wordpiece import corpus_tokenizer\n"
            "given = {'kind': 'jsonl', 'path': sys.argv[1], 'vocab_size': 400, 'heldout': 0.2}\n"
            "corpus_tokenizer(*parts(text_config(**given, cache=sys.argv[2], workers=1)))\n"
        )
        arguments = [str(reviews.corpus.path), f"{tmp_path}/{name}"]
        subprocess.run([sys.executable, "-c", code, *arguments], cwd=ROOT, check=True)
        (file,) = (tmp_path / name).glob("wordpiece/*.json")
        made.append(file.read_text())
        assert {path.suffix for path in file.parent.iterdir()} == {".json", ".sha256"}
    assert made[0] == made[1]
    tokenizer = corpus_tokenizer(*parts(changed(reviews, vocab_size=400, cache=f"{tmp_path}/one")))
    assert not lines and len(tokenizer) <= 400
    assert tokenizer.convert_tokens_to_ids(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]) == [0, 1, 2, 3, 4]
    tokenizer.save_pretrained(tmp_path / "saved")
    loaded = AutoTokenizer.from_pretrained(tmp_path / "saved")
    text = "Ban DAN fart [MASK]."
    assert loaded(text)["input_ids"] == tokenizer(text)["input_ids"]
    assert loaded.decode(loaded(text)["input_ids"]) == "[CLS] ban dan fart [MASK]. [SEP]"
    assert loaded.mask_token_id == 4 and loaded("x~")["input_ids"].count(1) == 2


def test_wordpiece_keeps_the_commonest_letters_of_many(tmp_path: Path) -> None:
    rare = "".join(map(chr, range(0x4E00, 0x5000)))
    (tmp_path / "a.txt").write_text("\n\n".join([some_text(3, 3000), rare, some_text(4, 3000)]))
    given = {"kind": "text", "path": f"{tmp_path}/a.txt", "heldout": 0.0, "workers": 1, "cache": str(tmp_path)}
    config = text_config(**given, vocab_size=300)
    tokenizer = corpus_tokenizer(*parts(config))
    assert len(tokenizer) == 300 and {"b", "a", "##a"} <= set(tokenizer.get_vocab())
    with pytest.raises(SettingError, match=r"^corpus\.vocab_size=50"):
        corpus_tokenizer(*parts(changed(config, vocab_size=50)))
    (tmp_path / "a.txt").write_text(" \n")
    with pytest.raises(SettingError, match=r"^corpus\.path"):
        corpus_tokenizer(*parts(config))
