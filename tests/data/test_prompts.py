"""Text with prompts: which tokens of it count, against naive loops over the documents."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chat_templates import smollm2
from chats import FORMAT, TOKENIZER, chats, naive_rows, tokens_of
from test_sources import write_lines
from tiny import PAD, all_of, make_batches, parts, text_config
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from distill.config.component import Component
from distill.config.settings import Config, DataConfig, SourceConfig
from distill.data.collate.clm import CausalLM
from distill.data.packing import load_tokenizer, without_first_space
from distill.data.sources import Document, Part, Shard, Source, find_source, read
from distill.data.tokens import corpus_text, prepare
from distill.runtime.errors import SettingError


def documents_of(settings: SourceConfig | Component, tokenizer: Any = None) -> list[Document]:
    source = find_source(settings, "corpus", DataConfig())
    assert source is not None
    source = source if tokenizer is None else source.for_tokenizer(tokenizer)
    return [document for shard in source.shards() for document in read(source, shard)]


@pytest.mark.parametrize("cross", [True, False], ids=["packed", "apart"])
def test_targets_are_those_of_a_naive_loop(tmp_path: Path, cross: bool) -> None:
    found = tokens_of(chats(tmp_path, cross_documents=cross))
    expected = naive_rows(32, cross)
    assert found.prompts and found.sequences.dtype["id"] == np.uint16
    batch = make_batches(found.sequences, CausalLM(FORMAT, cross), len(expected), 1, 0).batch(
        np.arange(len(expected)), 0
    )
    for row, given, places in zip(
        expected, batch.ids.numpy(), batch.inputs.get("position_ids", [None] * len(expected)), strict=True
    ):
        assert given[: len(row)].tolist() == [id_ for id_, _, _ in row]
        if places is not None:
            first = {number: index for index, (_, _, number) in reversed(list(enumerate(row)))}
            assert places[: len(row)].tolist() == [index - first[number] for index, (_, _, number) in enumerate(row)]
    wanted = {
        index * 32 + at: row[at + 1][0]
        for index, row in enumerate(expected)
        for at in range(len(row) - 1)
        if row[at + 1][1] and row[at + 1][2] == row[at][2]
    }
    assert dict(zip(*map(lambda each: each.tolist(), batch.targets), strict=True)) == wanted
    assert batch.num_valid == found.tokens == sum(map(len, expected))
    assert 0 < len(wanted) < 0.7 * found.tokens
    ids = [id_ for row in expected for id_, _, _ in row]
    padding = all_of(found.sequences).size - len(ids)
    counts = np.bincount(ids, minlength=len(TOKENIZER))
    counts[PAD] += padding
    np.testing.assert_array_equal(found.counts, counts)


def test_prompt_and_completion_of_every_format(tmp_path: Path) -> None:
    records: list[object] = [{"ask": f"Question {i}:", "answer": f" answer {i} "} for i in range(5)]
    records += [{"ask": "alone", "answer": ""}, {"ask": None, "answer": "unasked"}]
    parts = [(Part(f"Question {i}:", False), Part(f" answer {i} ")) for i in range(5)] + [(Part("unasked"),)]
    write_lines(tmp_path / "lines/train.jsonl", records)
    columns = {"field": "answer", "prompt": "ask"}
    found = documents_of(SourceConfig(kind="jsonl", path=f"{tmp_path}/lines", **columns))
    assert [document.parts for document in found] == parts
    assert found[0].text == "Question 0: answer 0 "
    found = documents_of(SourceConfig(kind="hub", hub=f"{tmp_path}/lines", **columns))
    assert [document.parts for document in found] == parts
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist([{**each, "id": 1} for each in records]), tmp_path / "x.parquet")  # type: ignore[dict-item]
    parquet = SourceConfig(kind="parquet", path=f"{tmp_path}/x.parquet", **columns)
    assert [document.parts for document in documents_of(parquet)] == parts
    parquet = parquet.changed(prompt="nosuch")
    with pytest.raises(SettingError, match=r"^corpus\.prompt=nosuch: x\.parquet: no such field; it has ask, answer"):
        documents_of(parquet)


def test_a_conversation_without_a_template_is_written_by_the_default(tmp_path: Path) -> None:
    said = [{"role": role, "content": text} for role, text in (("user", "Hi"), ("assistant", "Hello"), ("user", None))]
    path = write_lines(tmp_path / "x.jsonl", [{"messages": said}, {"messages": said[:1]}, {"messages": None}])
    settings = SourceConfig(kind="chat", path=str(path))
    (plain,) = documents_of(settings)  # for the training of a tokenizer; what has no answer is left out
    tokenizer = smollm2(None)
    (document,) = documents_of(settings, tokenizer)
    assert document.text == f"{tokenizer.bos_token}{plain.text}"
    assert plain.text == "<|user|>\nHi\n<|assistant|>\nHello\n<|user|>\n\n"
    assert document.ids is not None and document.loss_mask is not None
    assert tokenizer.decode(document.ids) == document.text
    assert tokenizer.decode(document.ids[document.loss_mask]) == "Hello\n"


@pytest.mark.parametrize("count", [8, 200])
def test_a_document_with_parts_is_held_out_whole(tmp_path: Path, count: int) -> None:
    """Of few documents too, of which others are held out by their paragraphs."""
    answer = "\n\n".join(["the cat. " * 100] * 20)
    records: list[object] = [
        {"prompt": f"cat {chr(97 + i % 26)} {i // 26 * 'an'}", "text": answer} for i in range(count)
    ]
    path = write_lines(tmp_path / "x.jsonl", records)
    config = text_config(
        kind="jsonl", path=str(path), prompt="prompt", heldout=0.2, sequence_length=512, workers=1, cache=str(tmp_path)
    )
    lengths = set()
    for part in ("train", "heldout"):
        found = tokens_of(config, part)
        rows = all_of(found.sequences)
        has_prompt = ~rows["loss_mask"].all(1, where=rows["id"] != PAD)
        assert found.documents == (has_prompt & (rows["id"][:, 0] == FORMAT.document_start)).sum()
        lengths.add(found.documents)
    assert sum(lengths) == count and 0 < min(lengths) < 0.35 * count


@pytest.mark.parametrize("form", ["metaspace", "prepend", "bytes"])
def test_a_text_in_parts_has_no_space_before_each(form: str) -> None:
    """Tokenizers in the manner of SentencePiece put one before a text."""
    pieces = ["[UNK]", *"▁Ġabcdefghi"]
    tokenizer = Tokenizer(models.BPE({piece: number for number, piece in enumerate(pieces)}, [], unk_token="[UNK]"))
    if form == "metaspace":
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Metaspace(prepend_scheme="first")])
    elif form == "prepend":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    whole = tokenizer.to_str()
    first, rest = load_tokenizer(whole), load_tokenizer(without_first_space(whole))
    assert first.encode("ab cdef").ids == first.encode("ab c").ids + rest.encode("def").ids
    assert first.encode("def").ids != rest.encode("def").ids


# --- one's own


class Riddles(Source):
    """As a user would write it: lines of a riddle, a bar and its answer."""

    prompts = True

    def __init__(self, path: str) -> None:
        self.path = path

    def shards(self) -> list[Shard]:
        return [Shard((self.path,))]

    def documents(self, shard: Shard) -> Iterator[Document]:
        for number, line in enumerate(Path(shard.paths[0]).read_text().splitlines()):
            riddle, answer = line.split("|")
            yield Document.of_parts(f"riddle {number}", [Part(riddle, loss=False), Part(answer)])


class Undeclared(Riddles):
    prompts = False


def own(name: str, folder: Path) -> Config:
    (folder / "riddles").write_text("the cat|an hat\nan hat|then\n")
    config = text_config(kind="text", heldout=0.0, sequence_length=32, workers=1, cache=str(folder))
    return config.changed(corpus=config.corpus.changed(target=f"{__name__}.{name}", path=f"{folder}/riddles"))


def test_a_source_of_ones_own_with_prompts(tmp_path: Path) -> None:
    row, _ = all_of(tokens_of(own("Riddles", tmp_path)).sequences)
    text = row[row["id"] != PAD]
    assert TOKENIZER.decode(text["id"][~text["loss_mask"]]) == "the cat"
    assert TOKENIZER.decode(text["id"][text["loss_mask"]]) == "[CLS]an hat[SEP]"


# --- what cannot be had


def test_what_cannot_have_prompts_is_refused_in_one_line(tmp_path: Path, words: PreTrainedTokenizerFast) -> None:
    with pytest.raises(SettingError, match=r"^Undeclared gives documents of parts, such as riddle 0: .*prompts = True"):
        tokens_of(own("Undeclared", tmp_path))
    for config in (own("Riddles", tmp_path), chats(tmp_path)):
        with pytest.raises(SettingError, match=r"^corpus: has prompts, .*objective\.task=clm"):
            prepare(corpus_text(*parts(config)), words, *parts(config), "train")
    with pytest.raises(SettingError, match=r"^corpus\.prompt='ask': corpus\.kind=text has no such setting"):
        documents_of(SourceConfig(kind="text", path=str(tmp_path), prompt="ask"))
    with pytest.raises(SettingError, match=r"^corpus\.template='x': corpus\.kind=jsonl has no such setting"):
        documents_of(SourceConfig(kind="jsonl", path=str(tmp_path), template="x"))
