"""Token ids that a program holds: what stands inside a row stays, padding goes, and labels of -100 mark prompts."""

from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from tiny import all_of, parts, text_config
from vocabularies import vocabulary_of

from distill.config.settings import SourceConfig
from distill.data import new_tokenizer
from distill.data.new_tokenizer import byte_bpe
from distill.data.sequence_format import causal_format, masked_format
from distill.data.sequence_store import ids_of
from distill.data.sources import Source, _files
from distill.data.sources._in_memory import ChatsInMemory, IdsInMemory, source_in_memory
from distill.data.tokens import Text, prepare
from distill.runtime.errors import SettingError

A, B, C, D = 40, 41, 42, 43  # ids of text


def source_of(rows: dict[str, Any]) -> Source:
    return source_in_memory(datasets.Dataset.from_dict(rows), str(rows), "rows", SourceConfig(kind="hub"), "corpus")


def tokens_of(rows: dict[str, Any], tokenizer: Any, folder: Path, made: Any = causal_format) -> list[np.ndarray]:
    """The sequences without their padding."""
    config = text_config(kind="hub", hub="rows", heldout=0.0, sequence_length=16, cache=str(folder))
    found = prepare(Text((source_of(rows),), "corpus"), tokenizer, config.corpus, config.data, "train", made)
    pad = made(tokenizer).pad
    return [row[ids_of(row) != pad] for row in all_of(found.sequences)]


def sequences_of(rows: dict[str, Any], tokenizer: Any, folder: Path, made: Any = causal_format) -> list[list[int]]:
    return [ids_of(row).tolist() for row in tokens_of(rows, tokenizer, folder, made)]


def test_ends_of_documents_inside_a_row_stay(tmp_path: Path) -> None:
    """As `group_texts` packs them; a token that pads and ends a document is padding at the ends of a row alone."""
    tokenizer = vocabulary_of("gpt2")
    end = tokenizer.eos_token_id
    rows = {"input_ids": [[end, A, B, end, C, end, end], [A, end, end, B]]}
    assert sequences_of(rows, tokenizer, tmp_path) == [[A, B, end, C, end], [A, end, end, B, end]]


def test_padding_of_its_own_goes_and_beginnings_inside_stay(tmp_path: Path) -> None:
    tokenizer = vocabulary_of("gemma")
    pad, begin, end = tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id
    rows = {"input_ids": [[pad, begin, A, end, pad, begin, B, end, pad]], "attention_mask": [[0, *[1] * 8]]}
    assert sequences_of(rows, tokenizer, tmp_path) == [[begin, A, end, begin, B, end]]


def test_separators_of_masked_models_stay(tmp_path: Path) -> None:
    tokenizer = vocabulary_of("bert")
    cls, sep, pad = tokenizer.cls_token_id, tokenizer.sep_token_id, tokenizer.pad_token_id
    row = [cls, A, B, C, D, sep, A, B, C, sep]
    rows = {"input_ids": [[*row, pad, pad]], "labels": [[*row, -100, -100]]}
    assert sequences_of(rows, tokenizer, tmp_path, masked_format) == [row]


def test_labels_mark_prompts(tmp_path: Path) -> None:
    """As of `apply_chat_template`, where Qwen ends turns with its end-of-text token."""
    tokenizer = vocabulary_of("qwen2")
    end = tokenizer.eos_token_id
    ids = [[A, B, end, C, D, end, end], [A, end, B, end, C, end, A], [A, B, end, end, end, end, end]]
    labels = [[-100, -100, -100, C, D, end, -100], [-100, -100, B, end, -100, -100, A], [-100] * 7]
    rows = {"input_ids": ids, "labels": labels}
    found = tokens_of(rows, tokenizer, tmp_path)
    expected = [[A, B, end, C, D, end], [A, end, B, end, C, end, A, end]]
    assert [row["id"].tolist() for row in found] == expected
    assert [row["loss_mask"].tolist() for row in found] == [
        [False, False, False, True, True, True],
        [False, False, True, True, False, False, True, True],
    ]
    plain = {"input_ids": ids[:1], "labels": [[A, B, end, C, D, -100, -100]]}  # only padding does not count
    assert sequences_of(plain, tokenizer, tmp_path) == [[A, B, end, C, D, end]]
    with pytest.raises(SettingError, match=r"^corpus: has prompts, which only causal models leave out"):
        sequences_of(rows, vocabulary_of("bert"), tmp_path, masked_format)


def test_labels_of_something_else_are_refused(tmp_path: Path) -> None:
    rows: dict[str, Any] = {"input_ids": [[A, B, C]] * 3, "labels": [[A, B, C], [A, -100, C], [B, C, -100]]}
    with pytest.raises(SettingError, match=r"^corpus\.field=input_ids: rows has other ids in its column labels"):
        sequences_of(rows, vocabulary_of("gpt2"), tmp_path)
    assert len(sequences_of(rows | {"labels": [0, 1, 0]}, vocabulary_of("gpt2"), tmp_path)) == 3  # classes


def test_a_first_row_that_is_empty_does_not_hide_what_the_others_hold() -> None:
    turns = [{"role": "user", "content": "One?"}, {"role": "assistant", "content": "Two."}]
    assert isinstance(source_of({"input_ids": [[], [A, B]]}), IdsInMemory)
    assert isinstance(source_of({"messages": [[], turns]}), ChatsInMemory)


def test_a_mask_of_another_length_is_one_line(tmp_path: Path) -> None:
    rows = {"input_ids": [[A, B, C]], "attention_mask": [[1, 1]]}
    line = r"^corpus\.field=input_ids: a row of rows has 3 ids and 2 numbers in attention_mask: give one for each"
    with pytest.raises(SettingError, match=line):
        sequences_of(rows, vocabulary_of("gpt2"), tmp_path)


def test_a_bad_row_is_named_by_its_number_in_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_files, "SHARD_ROWS", 3)
    source = source_of({"input_ids": [[A, B]] * 5, "attention_mask": [*[[1, 1]] * 4, [1]]})
    with pytest.raises(SettingError, match=r"rows, row 5"):
        [each for shard in source.shards() for each in source.documents(shard)]


def test_no_tokenizer_is_trained_on_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = Text((source_of({"input_ids": [[A, B]]}),), "corpus")
    monkeypatch.setattr(new_tokenizer, "corpus_texts", lambda corpus, data: {"": text})
    with pytest.raises(SettingError, match=r"^corpus: rows holds token ids, which no new tokenizer has: give the tok"):
        byte_bpe(*parts(text_config(kind="hub", hub="rows", cache=str(tmp_path))))
