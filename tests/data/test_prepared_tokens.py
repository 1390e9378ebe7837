"""`corpus=tokens`: prepared sequences are trained on where their text is not."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from text import tokens_of
from tiny import all_of, changed, make_tokenizer, parts
from transformers import PreTrainedTokenizerFast

from distill.config.settings import Config
from distill.data import new_tokenizer
from distill.data.sequence_format import paired_format
from distill.data.shards import Shards
from distill.data.tokens import Tokens, corpus_text, prepare, set_text
from distill.runtime.errors import SettingError, StorageFailed


@pytest.fixture
def prepared(reviews: Config, words: PreTrainedTokenizerFast, tmp_path: Path) -> tuple[Config, Tokens]:
    """The settings of a run on sequences whose text is gone, and what they were when it was there."""
    made = tokens_of(changed(reviews, tokens=str(tmp_path / "tokens")), words)
    heldout = tokens_of(changed(reviews, tokens=str(tmp_path / "tokens")), words, "heldout")
    made.sources["heldout"] = heldout
    for folder in (str(reviews.corpus.path), str(tmp_path / "cache")):
        shutil.rmtree(folder)
    (tmp_path / "tokens").rename(tmp_path / "elsewhere")
    return changed(reviews, kind="tokens", path=str(tmp_path / "elsewhere")), made


@pytest.mark.parametrize("inner", [False, True])
def test_the_sequences_are_those_of_the_text(
    prepared: tuple[Config, Tokens], words: PreTrainedTokenizerFast, inner: bool, tmp_path: Path
) -> None:
    config, made = prepared
    if inner:
        config = changed(config, path=str(next((tmp_path / "elsewhere").iterdir())), max_sequences=5)
    for part, before in (("train", made), ("heldout", made.sources["heldout"])):
        found = tokens_of(config, words, part)
        assert (found.digest, found.name, found.documents) == (before.digest, before.name, before.documents)
        assert isinstance(found.sequences, Shards) and tmp_path / "elsewhere" in found.sequences.folder.path.parents
        np.testing.assert_array_equal(all_of(found.sequences).shape, before.sequences.shape)


@pytest.mark.parametrize(
    ("changes", "setting", "cure"),
    [
        ({"sequence_length": 64}, "corpus.sequence_length", "corpus.sequence_length=32"),
        ({"heldout": 0.5, "cross_documents": True}, "corpus.cross_documents", "corpus.heldout=0.2"),
        ({"duplicates": "drop"}, "corpus.duplicates", "corpus.duplicates=keep"),
        ({"path": "/nowhere"}, "corpus.path", "distill prepare"),
        ({"fraction": 0.5}, "corpus.fraction", "leave it out"),
        ({"field": "text"}, "corpus.field", "leave it out"),
    ],
)
def test_other_settings_are_refused(
    prepared: tuple[Config, Tokens], words: PreTrainedTokenizerFast, changes: dict[str, Any], setting: str, cure: str
) -> None:
    with pytest.raises(SettingError) as error:
        tokens_of(changed(prepared[0], **changes), words)
    assert error.value.setting == setting and cure in error.value.cure


def test_another_tokenizer_task_or_use_is_refused(
    prepared: tuple[Config, Tokens], words: PreTrainedTokenizerFast, reviews: Config
) -> None:
    config = prepared[0]
    text = corpus_text(*parts(config))
    with pytest.raises(SettingError, match="another objective"):
        prepare(text, words, *parts(config), "train", paired_format)
    with pytest.raises(SettingError, match="another tokenizer"):
        prepare(text, make_tokenizer(), *parts(config), "train")
    with pytest.raises(SettingError, match="token ids, which no new tokenizer has"):
        new_tokenizer.wordpiece(*parts(config))
    of_set = set_text(config.corpus, "evaluate.sources.mine", config.data)
    assert of_set is not None
    with pytest.raises(SettingError, match="those of a corpus"):
        prepare(of_set, words, *parts(config), "all")


def test_of_several_texts_the_folder_is_named(reviews: Config, words: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    config = changed(reviews, tokens=str(tmp_path / "tokens"))
    tokens_of(config, words)
    other = tokens_of(changed(config, path=f"{reviews.corpus.path}/b.jsonl"), words)
    stored = changed(reviews, kind="tokens", path=str(tmp_path / "tokens"))
    with pytest.raises(SettingError, match="several texts") as error:
        tokens_of(stored, words)
    assert isinstance(other.sequences, Shards) and (place := other.sequences.folder.place) in str(error.value)
    assert tokens_of(changed(stored, path=place), words).digest == other.digest


def test_damage_is_noticed_and_stays(prepared: tuple[Config, Tokens], words: PreTrainedTokenizerFast) -> None:
    (shard,) = Path(str(prepared[0].corpus.path)).rglob("train-00000.bin")
    data = bytearray(shard.read_bytes())
    data[100] ^= 1
    shard.write_bytes(data)
    found = tokens_of(prepared[0], words)
    with pytest.raises(StorageFailed, match=rf"^{shard} is damaged"):
        all_of(found.sequences)
    assert shard.exists()
    (shard.parent / "index.json").write_bytes(b"{}")
    with pytest.raises(SettingError, match="restore that file, or prepare it again") as error:
        tokens_of(prepared[0], words)
    assert error.value.setting == "corpus.path" and shard.exists()
