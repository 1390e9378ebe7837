"""Perplexity of causal models and bits per byte, against a loop over the tokens of whole documents in float64."""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from families import make_family
from vocabularies import special_ids, vocabulary_of

from distill.config.settings import BackendConfig, EvaluateConfig
from distill.data.collate.clm import CausalLM
from distill.data.sequence_format import causal_format
from distill.distributed.single import Single
from distill.evaluation.measures import Scoring
from distill.evaluation.perplexity import WindowPass
from distill.evaluation.sets import EvaluationSet
from distill.models.language_model import LanguageModel

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


def make_text(family: str, packed: bool) -> Text:
    tokenizer = vocabulary_of(family)
    rows_format, random = causal_format(tokenizer), np.random.default_rng(4)
    special = set(tokenizer.all_special_ids)
    plain = [id_ for id_ in range(len(tokenizer)) if id_ not in special]
    begin = [] if rows_format.document_start is None else [rows_format.document_start]
    documents = [[*begin, *random.choice(plain, length).tolist(), rows_format.document_end] for length in LENGTHS]
    places, flat = [], 0
    for document in documents:
        places.append([divmod(flat + number, WIDTH) for number in range(len(document))])
        flat += len(document)
        if not packed:
            flat += -flat % WIDTH
    rows = np.full((-(-flat // WIDTH), WIDTH), rows_format.pad, np.uint16)
    for document, where in zip(documents, places, strict=True):
        for id_, place in zip(document, where, strict=True):
            rows[place] = id_
    return Text(tokenizer, make_family(family, **special_ids(tokenizer)), rows, documents, places, packed)


@pytest.fixture(scope="module", params=[("gpt2", True), ("gpt2", False), ("llama", True), ("gemma2", True)])
def text(request: Any) -> Text:
    return make_text(*request.param)


class Rank(Single):
    """One of several ranks, whose sums stay its own."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(BackendConfig(device="cpu"))
        self.rank, self.size = rank, size

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        return values


def measure(text: Text, stride: int | None, batch_size: int = 5, rank: int = 0, size: int = 1) -> WindowPass:
    collator = CausalLM(causal_format(text.tokenizer), text.packed)
    settings = EvaluateConfig(stride=stride, batch_size=batch_size)
    return WindowPass(Scoring(collator, text.tokenizer, settings, Rank(rank, size)))


def silent(_: int) -> None:
    return None


def sums(run: WindowPass, model: LanguageModel, data: EvaluationSet) -> list[float]:
    """What the rank of this pass adds up itself: losses, tokens, losses of text, and its bytes."""
    with pytest.MonkeyPatch.context() as patch:
        own: list[torch.Tensor] = []
        patch.setattr(run.scoring.ranks, "sum", lambda sums: own.append(sums) or sums)
        run.score(model, data, silent)
    return list(own[0][:, -1].tolist())


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
    if id_ in text.tokenizer.all_special_ids:
        return 0
    token = text.tokenizer.convert_ids_to_tokens(id_)
    if token.startswith("<0x"):
        return 1
    if text.tokenizer.backend_tokenizer.decoder.__class__.__name__ == "ByteLevel":
        return len(token)
    return len(token.replace("\u2581", " ").encode())


@pytest.mark.parametrize("stride", [1, 5, 6, 11, None])
def test_it_is_that_of_a_loop_over_documents(text: Text, stride: int | None) -> None:
    expected = list(naive(text, stride or WIDTH // 2))
    data = EvaluationSet("set", "a set", text.rows, len(text.documents))
    scored = measure(text, stride)
    model = LanguageModel(text.model)
    done: list[int] = []
    with torch.no_grad():
        values, positions, _ = scored.score(model, data, done.append)
    found, bits = values.values()
    assert sum(done) == len(text.rows) == scored.size(data)
    losses = [each.loss for each in expected]
    assert positions == len(losses) == sum(map(len, text.documents)) - len(text.documents)
    assert found == pytest.approx(math.exp(np.mean(losses)), rel=1e-5)
    plain = [(each.loss, bytes_of(text, each.id)) for each in expected if bytes_of(text, each.id)]
    assert len(plain) < len(expected)
    text_bits = sum(loss for loss, _ in plain) / math.log(2) / sum(count for _, count in plain)
    assert bits == pytest.approx(text_bits, rel=1e-5)


def test_batches_ranks_and_chosen_rows_change_nothing(text: Text) -> None:
    expected = list(naive(text, 5))
    model, every = LanguageModel(text.model), np.arange(len(text.rows))
    for numbers in (every, every[1::2], np.array([3, 0, 7])):
        data = EvaluationSet("set", "", text.rows[numbers], 1, text.rows, numbers)
        losses = [each.loss for each in expected if each.row in numbers]
        for batch_size, size in ((1, 1), (64, 1), (4, 2), (3, 5)):
            with torch.no_grad():
                totals = [sums(measure(text, 5, batch_size, rank, size), model, data) for rank in range(size)]
            assert sum(tokens for _, tokens, *_ in totals) == len(losses)
            assert sum(loss for loss, *_ in totals) == pytest.approx(sum(losses), rel=1e-5)
