"""The bytes of a text are those of its tokens, for every kind of vocabulary."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from vocabularies import PIECE_MERGES, sentence_pieces, vocabulary_of

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


def suffixed(pre_tokenizer: Any, **settings: Any) -> PreTrainedTokenizerFast:
    def trainer(**others: Any) -> Any:
        return trainers.BpeTrainer(vocab_size=200, end_of_word_suffix="</w>", **settings, **others)

    model = models.BPE(unk_token="<unk>", end_of_word_suffix="</w>")
    return trained(model, trainer, normalizers.Lowercase(), pre_tokenizer)


def without_a_blank() -> PreTrainedTokenizerFast:
    """The mark of a blank falls back to its three bytes."""
    pieces = sentence_pieces(SPECIAL)
    lacking = {piece: number for number, piece in enumerate(piece for piece in pieces if "\u2581" not in piece)}
    merges = [pair for pair in PIECE_MERGES if "\u2581" not in "".join(pair)]
    tokenizer = Tokenizer(models.BPE(lacking, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback()])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", unk_token="<unk>")


def unigram(**settings: Any) -> Any:
    return trainers.UnigramTrainer(vocab_size=100, unk_token="<unk>", **settings)


def word_level(pre_tokenizer: Any) -> PreTrainedTokenizerFast:
    return trained(models.WordLevel(unk_token="<unk>"), trainers.WordLevelTrainer, None, pre_tokenizer)


WORDS_AND_SIGNS = pre_tokenizers.Sequence(  # as CLIP's, which drops blanks before it writes bytes
    [pre_tokenizers.Split(Regex(r"\w+|[^\s\w]+"), "removed", invert=True), pre_tokenizers.ByteLevel(False)]
)
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
    "words and signs": lambda: word_level(pre_tokenizers.Whitespace()),
    "words between blanks": lambda: word_level(pre_tokenizers.WhitespaceSplit()),
    "wordpiece": lambda: trained(
        models.WordPiece(unk_token="<unk>"), trainers.WordPieceTrainer, None, pre_tokenizers.BertPreTokenizer()
    ),
    "</w>": lambda: suffixed(pre_tokenizers.BertPreTokenizer()),
    "</w> between blanks": lambda: suffixed(pre_tokenizers.WhitespaceSplit()),
    "</w> of bytes": lambda: suffixed(WORDS_AND_SIGNS, **ALPHABET),
    "byte fallback of the blank": without_a_blank,
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


def test_a_chinese_text_has_no_blanks() -> None:
    def trainer(**others: Any) -> Any:
        return trainers.WordPieceTrainer(vocab_size=100, initial_alphabet=list("東京大学"), **others)

    model = models.WordPiece(unk_token="<unk>")
    tokenizer = trained(model, trainer, normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer())
    ids = np.array([tokenizer("東京大学", add_special_tokens=False).input_ids])
    assert ids.shape == (1, 4) and TextBytes(tokenizer)(ids)[1].sum() == 12


def test_a_mark_of_headings_is_no_sign_of_wordpiece() -> None:
    tokenizer = vocabulary_of("mistral")
    ids = np.array([[tokenizer.get_vocab()[token] for token in ("a", "##", "\u2581the", "<0xC3>")]])
    assert TextBytes(tokenizer)(ids)[1].tolist() == [[1, 2, 4, 1]]


def test_tokens_that_were_added_are_text_unless_they_are_special() -> None:
    tokenizer = vocabulary_of("gpt2")
    tokenizer.add_tokens(["é!"])
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|user|>"]})
    ids = np.array([tokenizer("é!<|user|>", add_special_tokens=False).input_ids])
    is_text, num_bytes = TextBytes(tokenizer)(ids)
    assert is_text.tolist() == [[True, False]] and num_bytes.tolist() == [[3, 0]]
