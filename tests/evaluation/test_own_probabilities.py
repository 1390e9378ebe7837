"""A model with more rows than its tokenizer has tokens is scored by its own probabilities, those of all its rows."""

import math
from typing import Any

import pytest
import torch
from families import make_family
from test_scores import SET, make, measured
from tiny import VOCAB, make_model
from vocabularies import special_ids, vocabulary_of

from distill.evaluation import measures
from distill.evaluation.readers import MeanModel, MeanReader
from distill.evaluation.text_scores import score
from distill.models.loaded import LoadedModel

ROWS = VOCAB + 24


def test_the_score_of_a_text_is_the_models_own() -> None:
    tokenizer = vocabulary_of("gpt2")
    model = make_family("gpt2", **special_ids(tokenizer) | {"vocab_size": len(tokenizer) + 40})
    text = "the man and the end"
    ids = [tokenizer.bos_token_id, *tokenizer(text, add_special_tokens=False).input_ids]
    with torch.no_grad():
        log_probs = model(torch.tensor([ids])).logits.double().log_softmax(-1)[0]
    own = sum(float(log_probs[place, number]) for place, number in enumerate(ids[1:]))
    assert score(text, LoadedModel.of(model, tokenizer)).total == pytest.approx(own, rel=1e-5)


@pytest.mark.parametrize("measure", ["perplexity", "pseudo_perplexity"])
def test_perplexities_are_the_models_own(measure: str, tokenizer: Any) -> None:
    """Rows that nothing predicts by a logit of 0 each: of a bias of -inf, the model without them scores the same."""
    model, evaluator = make_model("distilbert", 2, vocab=ROWS), make(tokenizer)
    padded = measured(evaluator, measure, model, SET)
    bias = model.get_output_embeddings().bias
    with torch.no_grad():
        bias[VOCAB:] = -math.inf
    assert measured(evaluator, measure, model, SET) < 0.9 * padded


def test_the_mean_of_models_with_other_numbers_of_rows_is_a_distribution() -> None:
    mean = MeanReader(MeanModel([make_model("bert", 1), make_model("bert", 1, vocab=ROWS)], [0.5, 0.5]), "fp32")
    logits = mean.logits(torch.randn(3, sum(mean.widths)))
    assert logits.shape == (3, ROWS)
    torch.testing.assert_close(logits.exp().sum(-1), torch.ones(3))


def test_chunks_of_logits_change_nothing(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("distilbert", 2)
    whole = measured(make(tokenizer), "perplexity", model, SET)
    monkeypatch.setattr(measures, "LOGITS_BYTES", 8 * VOCAB * 3)
    assert measured(make(tokenizer), "perplexity", model, SET) == pytest.approx(whole, rel=1e-12)
