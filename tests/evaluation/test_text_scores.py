"""Scores of single texts against plain loops over transformers' own models, in float64."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from job import save_model

from distill.evaluation.text_scores import score
from distill.models.loaded import LoadedModel, load_model
from distill.runtime.errors import SettingError

TEXTS = ["the of cat.", "owls and the cat", "the", ""]  # words of one token and of several


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, LoadedModel]:
    folder = tmp_path_factory.mktemp("models")
    names = ("bert", "distilbert", "albert", "roberta", "gpt2", "llama")
    return {name: load_model(save_model(folder / name, name, 2), "cpu") for name in names}


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


MASKED = [(family, True) for family in ("bert", "distilbert", "albert", "roberta")]
CAUSAL = [(family, bos) for family in ("gpt2", "llama") for bos in (True, False)]


@pytest.mark.parametrize(("family", "bos"), [*MASKED, *CAUSAL])
def test_scores_are_those_of_plain_loops(family: str, bos: bool, saved: dict[str, LoadedModel]) -> None:
    model = saved[family]
    for batch_size in (1, 3, 64):
        for text, found in zip(TEXTS, score(TEXTS, model, bos=bos, batch_size=batch_size), strict=True):
            naive = naive_causal(model, text, bos) if model.kind.causal else naive_masked(model, text)
            expected = naive if text else []
            assert found.text == text and found.log_probs == pytest.approx(expected, abs=2e-5)
            assert len(found.tokens) == len(expected) and found.total == pytest.approx(sum(expected), abs=1e-4)


def test_bases_and_sums(saved: dict[str, LoadedModel]) -> None:
    masked = saved["bert"]
    nats, bits = score("the cat", masked), score("the cat", masked, base=2)
    assert bits.total == pytest.approx(nats.total / math.log(2)) and bits.perplexity == pytest.approx(nats.perplexity)
    assert nats.mean == pytest.approx(nats.total / len(nats.tokens)) == pytest.approx(-math.log(nats.perplexity))
    assert score([], masked) == [] and math.isnan(score("", masked).mean) and score("", masked).total == 0


def test_a_model_in_memory_is_scored_with_its_tokenizer(saved: dict[str, LoadedModel]) -> None:
    causal = saved["llama"]
    assert score("the cat", (causal.model, causal.tokenizer)) == score("the cat", causal)


@pytest.mark.parametrize(
    ("text", "model", "options", "line"),
    [
        ("the cat", "bert", {"bos": False}, "bos=False is for causal models"),
        ("the cat", "bert", {"base": 1}, "base=1 is no base"),
        ("the cat", "bert", {"batch_size": 0}, "batch_size=0"),
        (["the", "the cat " * 99], "gpt2", {}, "text 2 has .* tokens .* reads 64: split it"),
        ("the", "nothing", {}, "model=.*nothing does not load.*correct the name"),
        ("the", "alone", {}, r"model is a .* in memory, without its tokenizer: give \(model, tokeni"),
    ],
)
def test_what_does_not_fit(
    text: Any, model: str, options: dict[str, Any], line: str, saved: dict[str, LoadedModel]
) -> None:
    given = saved["llama"].model if model == "alone" else saved.get(model, Path("/nowhere/nothing"))
    with pytest.raises(SettingError, match=f"^{line}"):
        score(text, given, **options)
