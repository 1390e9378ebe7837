"""Labelled texts as sequences: what the tokenizer itself makes of them, and their batches."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tiny import make_batches
from tokenizers.processors import TemplateProcessing
from vocabularies import vocabulary_of

from distill.config.settings import BackendConfig, EvaluateConfig
from distill.data.collate.tables import Labelled
from distill.data.tables import LabelledTexts
from distill.data.text_pairs import class_sequences
from distill.distributed.single import Single
from distill.evaluation.classes import ClassSet
from distill.evaluation.measures import Scoring
from distill.runtime.errors import SettingError

FAMILIES = ["bert", "roberta", "albert", "xlm-roberta", "deberta-v2", "mpnet"]
WORDS = ["the", "cat", "and", "dog", "of", "bank", "running"]


def made(count: int = 30, pairs: bool = True, values: bool = False, longest: int = 12) -> LabelledTexts:
    random = np.random.default_rng(0)
    texts = [[" ".join(random.choice(WORDS, random.integers(1, longest))) for _ in range(count)] for _ in range(2)]
    labels = random.random(count) * 5 if values else random.integers(0, 3, count)
    return LabelledTexts("made", texts[0], texts[1] if pairs else None, labels, () if values else ("a", "b", "c"))


@pytest.mark.parametrize("pairs", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("room", [120, 28, 27])
def test_rows_are_what_the_tokenizer_itself_makes(family: str, pairs: bool, room: int) -> None:
    tokenizer, texts = vocabulary_of(family), made(pairs=pairs)
    max_length = room + tokenizer.num_special_tokens_to_add(pairs)
    rows = class_sequences(texts, tokenizer, max_length, "x")
    others = texts.second or [None] * len(texts)
    cut = 0
    for number, (one, other) in enumerate(zip(texts.first, others, strict=True)):
        whole = tokenizer(one, other)
        if too_long := len(whole.input_ids) > max_length:
            whole = tokenizer(one, other, truncation="longest_first", max_length=max_length)
        cut += too_long
        ids, parts = whole.input_ids, whole.sequence_ids(0)
        assert rows.sequences[number, : len(ids)].tolist() == ids
        assert (rows.sequences[number, len(ids) :] == tokenizer.pad_token_id).all()
        first = parts.index(1) if pairs else len(ids)
        assert np.flatnonzero(rows.segments[number]).tolist() == list(range(first, len(ids)))
    assert rows.cut == cut and (cut > 0) == (room < 30)
    assert np.array_equal(rows.targets["class"], texts.labels)


def test_rows_without_room_are_refused() -> None:
    with pytest.raises(SettingError, match=r"^x=4: no room for text; set 128 or so$"):
        class_sequences(made(), vocabulary_of("bert"), 4, "x")


@pytest.mark.parametrize(
    ("family", "lacking"), [("bert", "pad_token"), ("roberta", "pad_token"), ("gpt2", "eos_token")]
)
def test_a_tokenizer_without_padding_is_refused(family: str, lacking: str) -> None:
    tokenizer = vocabulary_of(family)
    setattr(tokenizer, lacking, None)
    assert tokenizer.pad_token_id is None
    with pytest.raises(SettingError, match=r"^teacher\.path=.*\[PAD\]"):
        class_sequences(made(), tokenizer, 32, "x")


def test_a_decoder_without_padding_fills_up_with_its_end_of_text() -> None:
    tokenizer, texts = vocabulary_of("gpt2"), made(pairs=False)
    assert tokenizer.pad_token_id is None
    rows = class_sequences(texts, tokenizer, 128, "x")
    assert rows.pad_id == tokenizer.eos_token_id and rows.cut == 0
    for row, text in zip(rows.sequences.tolist(), texts.first, strict=True):
        ids = tokenizer(text).input_ids
        assert row == [*ids, *[tokenizer.eos_token_id] * (128 - len(ids))]


def test_a_sequence_that_begins_with_its_padding_is_scored_to_its_end() -> None:
    """As of GPT-2 with `add_bos_token=True`, whose only special token begins a text and fills it up."""
    tokenizer, end = vocabulary_of("gpt2"), "<|endoftext|>"
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{end} $A", special_tokens=[(end, tokenizer.eos_token_id)]
    )
    rows = class_sequences(made(pairs=False), tokenizer, 128, "x")
    given: Any = {"labels": rows.targets["class"], "classes": ("a", "b", "c"), "measures": ("accuracy",)}
    data = ClassSet("made", "", rows.sequences, 30, collator=Labelled(rows), **given)
    scoring = Scoring(Labelled(rows), tokenizer, EvaluateConfig(), Single(BackendConfig(device="cpu")), [data])
    longest = int((rows.sequences != rows.pad_id).sum(1).max()) + 1
    assert scoring.batch(data, np.arange(30)).ids.numpy().tolist() == rows.sequences[:, :longest].tolist()


@pytest.mark.parametrize("values", [True, False])
def test_batches(values: bool) -> None:
    texts = made(values=values)
    rows = class_sequences(texts, vocabulary_of("albert"), 128, "x")
    collator: Any = Labelled(rows)
    seen = 0
    for batch in make_batches(rows.sequences, collator, 4, 2, seed=1).window(0):
        labels = batch.labels["class"]
        assert labels.positions.tolist() == [0, 1, 2, 3]
        assert labels.targets.dtype == (torch.float32 if values else torch.int64)
        assert torch.equal(
            labels.targets.double(), torch.from_numpy(texts.labels[batch.row_ids]).double().float().double()
        )
        assert batch.ids.shape[1] in (32, 64, 96, 128) and batch.ids.shape[1] - 32 < batch.num_valid
        assert "token_type_ids" in batch.inputs
        longest = int((rows.sequences[batch.row_ids] != rows.pad_id).sum(1).max())
        assert longest <= batch.ids.shape[1] < longest + 32
        seen += len(batch.row_ids)
    assert seen == 8


@pytest.mark.parametrize("values", [True, False])
def test_rows_of_texts_without_labels_follow_those_with(values: bool) -> None:
    tokenizer = vocabulary_of("bert")
    one, other = made(8, values=values), made(5, longest=20)
    bare = LabelledTexts("bare", other.first, other.second, np.empty(0), ())
    labelled, further = (class_sequences(each, tokenizer, 48, "x") for each in (one, bare))
    joined = labelled.with_unlabelled(further)
    assert len(joined) == 13 and joined.cut == labelled.cut + further.cut
    assert np.array_equal(joined.sequences, np.concatenate([labelled.sequences, further.sequences]))
    assert np.array_equal(joined.segments, np.concatenate([labelled.segments, further.segments]))
    assert np.array_equal(joined.targets["class"], one.labels)
    numbers = np.array([9, 3, 12, 0])
    batch = Labelled(joined).collate(joined.sequences[numbers].astype(np.int64), numbers.astype(np.uint64), numbers)
    positions, targets = batch.labels["class"]
    assert positions.tolist() == [1, 3] and np.allclose(targets, one.labels[[3, 0]]) and len(batch.ids) == 4
    fewer = replace(bare, first=bare.first[:4], second=(bare.second or [])[:4])
    again = labelled.with_unlabelled(class_sequences(fewer, tokenizer, 48, "x"))
    assert len({labelled.digest, further.digest, joined.digest, again.digest}) == 4
