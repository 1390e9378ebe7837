"""What the counts of a whole text say that no file of it can: whether a field is missing in one file or in all."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from text import some_text, tokens_of
from tiny import changed, parts, text_config
from transformers import PreTrainedTokenizerFast

from distill.config.settings import Config
from distill.data.byte_bpe import corpus_tokenizer
from distill.runtime.errors import SettingError


def write_records(folder: Path, suffix: str, field: str, texts: list[str], name: str) -> None:
    path = folder / f"{name}.{suffix}"
    if suffix == "parquet":
        pq.write_table(pa.table({field: texts, "id": texts}), path)
    elif suffix == "csv":
        path.write_text("\n".join([f"{field},id", *(f"{text},{text}" for text in texts)]))
    else:
        path.write_text("".join(json.dumps({field: text, "id": 1}) + "\n" for text in texts))


def corpus_of(folder: Path, suffix: str, workers: int | None = None) -> Config:
    settings = {
        "kind": suffix,
        "path": str(folder),
        "cache": str(folder.parent / "cache"),
        "heldout": 0.0,
        "sequence_length": 32,
    }
    return text_config(**settings, max_invalid=0.05, workers=workers)


@pytest.mark.parametrize("suffix", ["jsonl", "csv", "parquet"])
def test_a_stray_file_without_the_field_is_so_many_bad_records(
    tmp_path: Path, words: PreTrainedTokenizerFast, suffix: str
) -> None:
    folder = tmp_path / "corpus"
    folder.mkdir()
    for name in ("a", "z"):
        write_records(folder, suffix, "text", [some_text(seed, 30) for seed in range(50)], name)
    write_records(folder, suffix, "body", ["one", "two"], "meta")
    found = tokens_of(corpus_of(folder, suffix), words)
    assert found.documents == 100 and found.invalid.bad == 2 and found.invalid.records == 102
    assert "corpus.field=text: meta." in found.invalid.first_bad[0] and "it has body, id" in found.invalid.first_bad[0]
    write_records(folder, suffix, "body", ["no"] * 50, "meta")
    with pytest.raises(SettingError, match=r"50 of 150 records \(33\.3%\) are invalid, .*corpus\.field=text: meta"):
        tokens_of(corpus_of(folder, suffix), words)


@pytest.mark.parametrize("suffix", ["jsonl", "csv", "parquet"])
@pytest.mark.parametrize("workers", [1, 2])
def test_a_field_that_no_file_has_is_the_settings_fault(
    tmp_path: Path, words: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch, suffix: str, workers: int
) -> None:
    monkeypatch.setattr("distill.data.build_tokens.FEW_BYTES", 0)
    monkeypatch.setattr("distill.data.sources._files.SHARD_BYTES", 1)
    folder = tmp_path / "corpus"
    folder.mkdir()
    for name in ("a", "b", "c"):
        write_records(folder, suffix, "body", ["one", "two"], name)
    line = r"^corpus\.field=text: a\..* has no such field; it has body, id; none of 6 records can be used: name one"
    for _ in range(2):  # the second time the counts are read from the disk
        with pytest.raises(SettingError, match=line):
            tokens_of(corpus_of(folder, suffix, workers), words)
    with pytest.raises(SettingError, match=line):
        corpus_tokenizer(*parts(corpus_of(folder, suffix)))


@pytest.mark.parametrize("train", [False, True], ids=["tokens", "tokenizer"])
def test_where_no_file_can_be_read_the_first_reason_is_given(
    tmp_path: Path, words: PreTrainedTokenizerFast, train: bool
) -> None:
    folder = tmp_path / "corpus"
    folder.mkdir()
    write_records(folder, "parquet", "text", [some_text(1, 30)] * 50, "a")
    (folder / "a.parquet").write_bytes((folder / "a.parquet").read_bytes()[:-20])
    config = corpus_of(folder, "parquet")
    with pytest.raises(SettingError, match=r"corpus\.path=.*none of its files can be read, first a\.parquet: Arrow"):
        corpus_tokenizer(*parts(config)) if train else tokens_of(config, words)


@pytest.mark.parametrize("bad", ["record", "file"])
def test_stop_ends_a_preparation_before_anything_is_published(
    bad: str, tmp_path: Path, words: PreTrainedTokenizerFast
) -> None:
    folder = tmp_path / "corpus"
    folder.mkdir()
    write_records(folder, "jsonl", "text", [some_text(seed, 30) for seed in range(90)], "a")
    (folder / "b.jsonl").write_bytes(b"{no\n" if bad == "record" else b"\0\0")
    strict = changed(corpus_of(folder, "jsonl"), invalid_files="stop")
    with pytest.raises(SettingError, match=r"b\.jsonl") as caught:
        tokens_of(strict, words)
    assert "corpus.invalid_files=skip" in caught.value.cure
    assert not list((tmp_path / "cache").rglob("index.json"))
    tokens_of(corpus_of(folder, "jsonl"), words)
    with pytest.raises(SettingError, match=r"b\.jsonl"):  # though it is prepared now
        tokens_of(strict, words)
