"""Scores of single texts against plain loops over transformers' own models, in float64."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from job import save_model

from distill.evaluation.text_scores import TextScore, score
from distill.models.loaded import LoadedModel, load_model
from distill.runtime.errors import SettingError

TEXTS = ["the of cat.", "owls and the cat", "the", ""]  # words of one token and of several


@pytest.fixture(scope="module", params=["bert", "distilbert", "albert", "roberta"])
def masked(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_model(save_model(tmp_path_factory.mktemp("masked") / "model", request.param, 2), "cpu")


@pytest.fixture(scope="module", params=["gpt2", "llama"])
def causal(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_model(save_model(tmp_path_factory.mktemp("causal") / "model", request.param, 2), "cpu")


def naive_masked(found: LoadedModel, text: str) -> list[float]:
    """One forward for each token, with what transformers' tokenizer puts around the text."""
    model, encoded = found.model, found.tokenizer(text)
    ids, words = encoded["input_ids"], encoded.word_ids()
    values = []
    for place, word in enumerate(words):
        if word is None:
            continue
        row = torch.tensor([ids])
        row[0, place] = found.tokenizer.mask_token_id
        with torch.no_grad():
            logits = model(input_ids=row).logits[0, place].double()
        values.append(float(logits.log_softmax(-1)[ids[place]]))
    return values


def naive_causal(found: LoadedModel, text: str, bos: bool) -> list[float]:
    ids = found.tokenizer(text, add_special_tokens=False)["input_ids"]
    row = [found.tokenizer.bos_token_id, *ids] if bos else ids
    if len(row) < 2:
        return []
    with torch.no_grad():
        log_probs = found.model(input_ids=torch.tensor([row])).logits[0].double().log_softmax(-1)
    return [float(log_probs[place - 1, row[place]]) for place in range(1, len(row))]


def assert_alike(found: TextScore, expected: list[float]) -> None:
    assert found.log_probs == pytest.approx(expected, abs=2e-5)
    assert len(found.tokens) == len(expected) and found.total == pytest.approx(sum(expected), abs=1e-4)


def test_masked_models(masked: LoadedModel) -> None:
    for batch_size in (1, 3, 64):
        found = score(TEXTS, masked, batch_size=batch_size)
        for text, each in zip(TEXTS, found, strict=True):
            assert each.text == text
            assert_alike(each, naive_masked(masked, text) if text else [])


@pytest.mark.parametrize("bos", [True, False])
def test_causal_models(causal: LoadedModel, bos: bool) -> None:
    for batch_size in (1, 64):
        for text, each in zip(TEXTS, score(TEXTS, causal, bos=bos, batch_size=batch_size), strict=True):
            assert_alike(each, naive_causal(causal, text, bos) if text else [])


def test_bases_and_sums(masked: LoadedModel) -> None:
    nats, bits = score("the cat", masked), score("the cat", masked, base=2)
    assert bits.total == pytest.approx(nats.total / math.log(2)) and bits.perplexity == pytest.approx(nats.perplexity)
    assert nats.mean == pytest.approx(nats.total / len(nats.tokens)) == pytest.approx(-math.log(nats.perplexity))
    assert score([], masked) == [] and math.isnan(score("", masked).mean) and score("", masked).total == 0


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"bos": False}, r"^bos=False is for causal models"),
        ({"base": 1}, r"^base=1 is no base"),
        ({"batch_size": 0}, r"^batch_size=0"),
    ],
)
def test_options_that_do_not_fit(masked: LoadedModel, options: dict[str, Any], line: str) -> None:
    with pytest.raises(SettingError, match=line):
        score("the cat", masked, **options)


def test_texts_and_models_that_do_not_fit(tmp_path: Path, causal: LoadedModel) -> None:
    with pytest.raises(SettingError, match=r"^text 2 has .* tokens .* reads 64: split it"):
        score(["the", "the cat " * 99], causal)
    with pytest.raises(SettingError, match=r"^model=.*nothing does not load.*correct the name"):
        score("the", tmp_path / "nothing")


def test_a_model_in_memory_is_scored_with_its_tokenizer(causal: LoadedModel) -> None:
    assert score("the cat", (causal.model, causal.tokenizer)) == score("the cat", causal)
    with pytest.raises(SettingError, match=r"^model is a .* in memory, without its tokenizer: give \(model, tokeni"):
        score("the cat", causal.model)
