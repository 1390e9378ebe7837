"""The bytes of a text are those of its tokens, for every kind of vocabulary that writes blanks."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from vocabularies import vocabulary_of

from distill.evaluation.text_bytes import TextBytes

SENTENCE = "the man, and the end. naïve 東"
TEXT = "The old man's dog (a well-known one) said: the end, of that. Was it? It was!"
SPECIAL = ["<s>", "<unk>"]


def trained(model: Any, trainer: Any, normalizer: Any, pre_tokenizer: Any) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(model)
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    if pre_tokenizer is not None:
        tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.train_from_iterator([TEXT, SENTENCE] * 3, trainer(special_tokens=SPECIAL, show_progress=False))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", unk_token="<unk>")


def unigram(**settings: Any) -> Any:
    return trainers.UnigramTrainer(vocab_size=100, unk_token="<unk>", **settings)


def word_level(pre_tokenizer: Any) -> PreTrainedTokenizerFast:
    return trained(models.WordLevel(unk_token="<unk>"), trainers.WordLevelTrainer, None, pre_tokenizer)


ALPHABET: dict[str, Any] = {"initial_alphabet": pre_tokenizers.ByteLevel.alphabet()}
KINDS: dict[str, Callable[[], Any]] = {
    **{name: partial(vocabulary_of, name) for name in ("gpt2", "qwen2", "gpt_neox", "gemma", "mistral")},
    "byte-level with a blank before": lambda: trained(
        models.BPE(), lambda **others: trainers.BpeTrainer(**ALPHABET, **others), None, pre_tokenizers.ByteLevel(True)
    ),
    "unigram": lambda: trained(models.Unigram(), unigram, normalizers.NFKC(), pre_tokenizers.Metaspace()),
    "unigram with another mark": lambda: trained(
        models.Unigram(), unigram, None, pre_tokenizers.Metaspace("_", "never")
    ),
    "words and blanks": lambda: word_level(pre_tokenizers.Metaspace()),
}  # fmt: skip


@pytest.mark.parametrize("text", [TEXT, SENTENCE])
@pytest.mark.parametrize("kind", KINDS)
def test_the_bytes_of_a_text_are_those_of_its_tokens(kind: str, text: str) -> None:
    tokenizer = KINDS[kind]()
    begin = tokenizer.all_special_ids[0]
    ids = np.array([[begin, *tokenizer(text, add_special_tokens=False).input_ids, begin]])
    is_text, num_bytes = TextBytes(tokenizer)(ids)
    assert not is_text[0, [0, -1]].any() and (num_bytes[~is_text] == 0).all()
    assert not (ids == tokenizer.unk_token_id)[:, 1:-1].any() or kind in ("gpt2", "qwen2")
    assert num_bytes.sum() == len(text.encode())


def test_a_vocabulary_without_blanks_does_not_show_the_text() -> None:
    tokenizer = vocabulary_of("bert")
    is_text, num_bytes = TextBytes(tokenizer)(np.array([tokenizer(SENTENCE).input_ids]))
    assert not is_text.any() and not num_bytes.any()


def test_tokens_that_were_added_are_text_unless_they_are_special() -> None:
    tokenizer = vocabulary_of("gpt2")
    tokenizer.add_tokens(["é!"])
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|user|>"]})
    ids = np.array([tokenizer("é!<|user|>", add_special_tokens=False).input_ids])
    is_text, num_bytes = TextBytes(tokenizer)(ids)
    assert is_text.tolist() == [[True, False]] and num_bytes.tolist() == [[3, 0]]
