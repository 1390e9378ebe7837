"""Sequences of causal models are what a naive packer makes: documents end, and in some families begin, with a token."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_tokens import documents_of
from tiny import all_of, changed, make_tokenizer, parts
from vocabularies import special_ids, vocabulary_of

from distill.config.settings import Config
from distill.data.sequence_format import SequenceFormat, causal_format, masked_format
from distill.data.tokens import Tokens, corpus_text, prepare
from distill.runtime.errors import SettingError


def tokens_of(config: Config, tokenizer: Any, part: str = "all") -> Tokens:
    return prepare(corpus_text(*parts(config)), tokenizer, *parts(config), part, causal_format)


def naive(texts: list[str], tokenizer: Any, length: int, cross: bool, pad: int) -> list[list[int]]:
    begin = [tokenizer.bos_token_id] if tokenizer.bos_token_id not in (None, tokenizer.eos_token_id) else []
    streams = [[*begin, *tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id] for text in texts]
    if cross:
        streams = [[id_ for stream in streams for id_ in stream]]
    rows = [stream[start : start + length] for stream in streams for start in range(0, len(stream), length)]
    return [row + [pad] * (length - len(row)) for row in rows]


# GPT-2 has one token for both ends and none for padding, Llama 3 one for each end, Qwen pads with its end.
@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen2"])
@pytest.mark.parametrize("cross", [False, True])
def test_rows_are_those_of_a_naive_packer(reviews: Config, family: str, cross: bool) -> None:
    tokenizer = vocabulary_of(family)
    config = changed(reviews, sequence_length=48, cross_documents=cross, heldout=0.0)
    found = tokens_of(config, tokenizer, "train")
    pad = len(tokenizer)
    rows = naive(documents_of(config), tokenizer, 48, cross, pad)
    np.testing.assert_array_equal(all_of(found.sequences), rows)
    assert found.documents == 60 and found.tokens == sum(id_ != pad for row in rows for id_ in row)
    assert len(found.counts) == len(tokenizer) and found.counts.sum() == found.tokens


def test_padding_that_is_a_token_of_its_own_is_kept(reviews: Config) -> None:
    tokenizer = vocabulary_of("gemma")
    assert causal_format(tokenizer) == SequenceFormat(None, None, 2, 1, None, 0, 1)
    rows = all_of(tokens_of(changed(reviews, heldout=0.0), tokenizer, "train").sequences)
    assert (rows[:, 0] != 0).all() and (rows == 0).any() and (rows == 2).sum() == (rows == 1).sum() == 60


def test_the_name_of_a_special_token_in_a_text_is_text(reviews: Config) -> None:
    folder = Path(str(reviews.corpus.path))
    (folder / "a.jsonl").write_text('{"text": "one <|endoftext|> two"}')
    (folder / "b.jsonl").unlink()
    tokenizer = vocabulary_of("gpt2")
    (row,) = all_of(tokens_of(changed(reviews, heldout=0.0, sequence_length=48), tokenizer, "train").sequences)
    ids = row[row != len(tokenizer)]
    assert (ids == tokenizer.eos_token_id).sum() == 1 and ids[-1] == tokenizer.eos_token_id
    assert tokenizer.decode(ids[:-1]) == "one <|endoftext|> two"


@pytest.mark.parametrize(("family", "start", "end"), [("bert", 2, 3), ("roberta", 0, 2), ("xlm-roberta", 0, 2)])
def test_masked_rows_have_a_token_at_each_end(family: str, start: int, end: int) -> None:
    tokenizer = vocabulary_of(family)
    assert masked_format(tokenizer) == SequenceFormat(start, end, None, None, end, tokenizer.pad_token_id, 8)
    assert special_ids(tokenizer)["vocab_size"] == len(tokenizer)


def test_tokenizers_without_what_rows_need_are_refused() -> None:
    with pytest.raises(SettingError, match=r"teacher\.path=.*end-of-text token") as error:
        causal_format(make_tokenizer())
    assert "\n" not in str(error.value)
    with pytest.raises(SettingError, match=r"teacher\.path=.*\[PAD\] token; choose an encoder"):
        masked_format(vocabulary_of("gpt2"))
