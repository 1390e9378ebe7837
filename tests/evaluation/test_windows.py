"""Perplexity of causal models and bits per byte, against loops over the tokens of whole documents in float64."""

import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from chats import FORMAT, TEMPLATE, TOKENIZER, chats, naive_rows, tokens_of
from families import make_family
from tiny import all_of
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from torch.nn.functional import cross_entropy
from transformers import PreTrainedTokenizerFast
from vocabularies import PIECE_MERGES, sentence_pieces, special_ids, vocabulary_of

from distill.config.settings import BackendConfig, EvaluateConfig, PrecisionConfig
from distill.data.collate.clm import CausalLM
from distill.data.sequence_format import causal_format
from distill.distributed.single import Single
from distill.evaluation.evaluator import Evaluator
from distill.evaluation.measures import Scoring
from distill.evaluation.perplexity import WindowPass
from distill.evaluation.sets import EvaluationSet
from distill.evaluation.text_bytes import TextBytes
from distill.models.language_model import LanguageModel
from distill.tasks.clm import Clm

WIDTH = 12
LENGTHS = (31, 1, 12, 5, 23, 2, 40)  # tokens of the documents, special ones not counted


class Text(NamedTuple):
    """A tokenizer, a model, and documents of random tokens, laid out in sequences as packing does."""

    tokenizer: Any
    model: Any
    rows: np.ndarray
    documents: list[list[int]]
    places: list[list[tuple[int, int]]]  # sequence and column of each token of a document
    packed: bool


@pytest.fixture(scope="module", params=[("gpt2", True), ("gpt2", False), ("llama", True), ("gemma2", True)])
def text(request: Any) -> Text:
    family, packed = request.param
    tokenizer = vocabulary_of(family)
    rows_format, random = causal_format(tokenizer), np.random.default_rng(4)
    plain = sorted(set(range(len(tokenizer))) - set(tokenizer.all_special_ids))
    begin = [] if rows_format.document_start is None else [rows_format.document_start]
    documents = [[*begin, *random.choice(plain, length).tolist(), rows_format.document_end] for length in LENGTHS]
    places, flat = [], 0
    for document in documents:
        places.append([divmod(flat + number, WIDTH) for number in range(len(document))])
        flat += len(document)
        flat += 0 if packed else -flat % WIDTH
    rows = np.full((-(-flat // WIDTH), WIDTH), rows_format.pad, np.uint16)
    for document, where in zip(documents, places, strict=True):
        for id_, place in zip(document, where, strict=True):
            rows[place] = id_
    return Text(tokenizer, make_family(family, **special_ids(tokenizer)), rows, documents, places, packed)


def window_pass(text: Text, stride: int | None, batch_size: int = 5, rank: int = 0, size: int = 1) -> WindowPass:
    ranks = Single(BackendConfig(device="cpu"))
    ranks.rank, ranks.size = rank, size
    ranks.barrier = lambda: None  # type: ignore[method-assign]
    collator = CausalLM(causal_format(text.tokenizer), text.packed)
    return WindowPass(Scoring(collator, text.tokenizer, EvaluateConfig(stride=stride, batch_size=batch_size), ranks))


class Scored(NamedTuple):
    row: int
    id: int
    loss: float


def naive(text: Text, stride: int) -> Iterator[Scored]:
    """Every token but the first of each document, with as much before it as its window shows."""
    model = text.model.double()
    used = (text.rows != causal_format(text.tokenizer).pad).sum(1)
    for document, places in zip(text.documents, text.places, strict=True):
        flat = [row * WIDTH + column for row, column in places]
        for number in range(1, len(document)):
            row, column = places[number]
            end = row * WIDTH + min(column // stride * stride + stride, int(used[row]))
            context = [id_ for id_, place in zip(document[:number], flat, strict=False) if place >= end - WIDTH]
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([context])).logits[0, -1, : len(text.tokenizer)]
            yield Scored(row, document[number], -float(logits.log_softmax(-1)[document[number]]))
    model.float()


def bytes_of(text: Text, id_: int) -> int:
    """How many bytes of text a token stands for, by what the tokenizer makes of it behind another token."""
    token = text.tokenizer.convert_ids_to_tokens(id_)
    if id_ in text.tokenizer.all_special_ids or token.startswith("<0x"):
        return int(token.startswith("<0x"))
    is_byte_level = type(text.tokenizer.backend_tokenizer.decoder).__name__ == "ByteLevel"
    return len(token) if is_byte_level else len(token.replace("\u2581", " ").encode())


@pytest.mark.parametrize("stride", [1, 5, 6, 11, None])
def test_it_is_that_of_a_loop_over_documents(text: Text, stride: int | None) -> None:
    expected = list(naive(text, stride or WIDTH // 2))
    data = EvaluationSet("set", "a set", text.rows, len(text.documents))
    scored, done = window_pass(text, stride), list[int]()
    with torch.no_grad():
        values, positions, _ = scored.score(LanguageModel(text.model), data, done.append)
    assert sum(done) == len(text.rows) == scored.size(data)
    losses = [each.loss for each in expected]
    assert positions == len(losses) == sum(map(len, text.documents)) - len(text.documents)
    plain = [(each.loss, bytes_of(text, each.id)) for each in expected if bytes_of(text, each.id)]
    assert len(plain) < len(expected)
    bits = sum(loss for loss, _ in plain) / math.log(2) / sum(count for _, count in plain)
    assert values == pytest.approx({"perplexity": math.exp(np.mean(losses)), "bits_per_byte": bits}, rel=1e-5)


def test_batches_ranks_and_chosen_rows_change_nothing(text: Text) -> None:
    expected = list(naive(text, 5))
    model, every = LanguageModel(text.model), np.arange(len(text.rows))
    for numbers in (every, every[1::2], np.array([3, 0, 7])):
        data = EvaluationSet("set", "", text.rows[numbers], 1, text.rows, numbers)
        losses = [each.loss for each in expected if each.row in numbers]
        for batch_size, size in ((1, 1), (64, 1), (4, 2), (3, 5)):
            totals: list[list[float]] = []
            for rank in range(size):
                run = window_pass(text, 5, batch_size, rank, size)
                run.scoring.ranks.sum = lambda sums, totals=totals: totals.append(sums[:, -1].tolist()) or sums
                with torch.no_grad():
                    run.score(model, data, lambda _: None)
            assert sum(tokens for _, tokens, *_ in totals) == len(losses)
            assert sum(loss for loss, *_ in totals) == pytest.approx(sum(losses), rel=1e-5)


# --- text with prompts


def of_chats(prompts: bool, packed: bool, width: int) -> Evaluator:
    sets = [EvaluationSet("prompts", "", np.zeros((1, width), np.uint32), 1, prompts=prompts)]
    settings = EvaluateConfig(batch_size=5, stride=1)
    scoring = Scoring(CausalLM(FORMAT, packed), TOKENIZER, settings, Single(BackendConfig(device="cpu")), sets)
    return Evaluator(scoring, Clm().passes(scoring), PrecisionConfig())


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "apart"])
def test_of_conversations_what_counts_is_scored_after_its_prompt(tmp_path: Path, packed: bool) -> None:
    width = 24
    assert "[SEP]" in TEMPLATE  # inside a conversation, over whose sequences a window runs all the same
    found = tokens_of(chats(tmp_path, sequence_length=width, cross_documents=packed))
    data = EvaluationSet("chats", "", all_of(found.sequences), found.documents, found.sequences, prompts=found.prompts)
    model, evaluator = make_family("gpt2"), of_chats(True, packed, width)
    scores = evaluator.score(model, "model", [data])
    stream = [token for row in naive_rows(width, packed) for token in row]
    is_text, lengths = (part[0] for part in TextBytes(TOKENIZER)(np.array([[id_ for id_, *_ in stream]])))
    losses, bits, num_bytes = [], 0.0, 0
    for at, (id_, counts, number) in enumerate(stream):
        # A window holds the token itself and those of its conversation before it, which may begin in the sequence
        # before.
        context = [other for other, _, of in stream[max(0, at - width + 1) : at] if of == number]
        if not counts or not context:
            continue
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([context])).logits[0, -1]  # of all tokens: its own probabilities
        losses.append(float(cross_entropy(logits.double(), torch.tensor(id_))))
        bits += losses[-1] / np.log(2) * is_text[at]
        num_bytes += int(lengths[at])
    assert scores["perplexity"]["chats"] == pytest.approx(np.exp(np.mean(losses)), rel=1e-4)
    assert scores["bits_per_byte"]["chats"] == pytest.approx(bits / num_bytes, rel=1e-4)
    described = evaluator.describe(data)
    assert described["positions"] == len(losses) < 0.7 * described["tokens"] and described["tokens"] == len(stream)
    explanations = [of_chats(prompts, packed, width).measures[0].explanation for prompts in (True, False)]
    assert ["prompts are read and not scored" in each for each in explanations] == [True, False]


# --- bytes of text

SENTENCE = "the man, and the end. naïve 東"
TEXT = "The old man's dog (a well-known one) said: the end, of that. Was it? It was!"
SPECIAL = ["<s>", "<unk>"]


def trained(model: Any, trainer: Any, pre_tokenizer: Any, normalizer: Any = None) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(model)
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.train_from_iterator([TEXT, SENTENCE] * 3, trainer(special_tokens=SPECIAL, show_progress=False))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", unk_token="<unk>")


def without_a_blank() -> PreTrainedTokenizerFast:
    """The mark of a blank falls back to its three bytes."""
    pieces = sentence_pieces(SPECIAL)
    lacking = {piece: number for number, piece in enumerate(piece for piece in pieces if "\u2581" not in piece)}
    merges = [pair for pair in PIECE_MERGES if "\u2581" not in "".join(pair)]
    tokenizer = Tokenizer(models.BPE(lacking, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback()])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", unk_token="<unk>")


ALPHABET = partial(trainers.BpeTrainer, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
UNIGRAM = partial(trainers.UnigramTrainer, vocab_size=100, unk_token="<unk>")
KINDS: dict[str, Any] = {
    **{name: lambda name=name: vocabulary_of(name) for name in ("gpt2", "qwen2", "gpt_neox", "gemma", "mistral")},
    "byte-level with a blank before": lambda: trained(models.BPE(), ALPHABET, pre_tokenizers.ByteLevel(True)),
    "unigram": lambda: trained(models.Unigram(), UNIGRAM, pre_tokenizers.Metaspace(), normalizers.NFKC()),
    "unigram with another mark": lambda: trained(models.Unigram(), UNIGRAM, pre_tokenizers.Metaspace("_", "never")),
    "byte fallback of the blank": without_a_blank,
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_bytes_of_a_text_are_those_of_its_tokens(kind: str) -> None:
    tokenizer = KINDS[kind]()
    begin = tokenizer.all_special_ids[0]
    for text in (TEXT, SENTENCE):
        ids = np.array([[begin, *tokenizer(text, add_special_tokens=False).input_ids, begin]])
        is_text, num_bytes = TextBytes(tokenizer)(ids)
        assert not is_text[0, [0, -1]].any() and (num_bytes[~is_text] == 0).all()
        assert not (ids == tokenizer.unk_token_id)[:, 1:-1].any() or kind in ("gpt2", "qwen2")
        assert num_bytes.sum() == len(text.encode())


def test_odd_tokens_have_their_bytes() -> None:
    """A mark of headings is no sign of WordPiece, which tells none; what was added is text unless it is special."""
    assert not TextBytes(vocabulary_of("bert")).is_text.any()
    mistral, gpt2 = vocabulary_of("mistral"), vocabulary_of("gpt2")
    ids = np.array([[mistral.get_vocab()[token] for token in ("a", "##", "\u2581the", "<0xC3>")]])
    assert TextBytes(mistral)(ids)[1].tolist() == [[1, 2, 4, 1]]
    gpt2.add_tokens(["é!"])
    gpt2.add_special_tokens({"additional_special_tokens": ["<|user|>"]})
    is_text, num_bytes = TextBytes(gpt2)(np.array([gpt2("é!<|user|>", add_special_tokens=False).input_ids]))
    assert is_text.tolist() == [[True, False]] and num_bytes.tolist() == [[3, 0]]
