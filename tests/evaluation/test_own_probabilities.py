"""A model with more rows than its tokenizer has tokens is scored by its own probabilities, those of all its rows."""

import math
from typing import Any

import pytest
import torch
from test_scores import SET, make, measured
from tiny import VOCAB, make_model

from distill.evaluation import measures
from distill.evaluation.readers import MeanModel, MeanReader

ROWS = VOCAB + 24


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
    assert measured(make(tokenizer), "perplexity", model, SET) == pytest.approx(whole, rel=1e-6)
