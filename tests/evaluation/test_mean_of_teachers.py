"""Several teachers scored together: the numbers of a plain loop over the mean of their probabilities."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from naive import attention_of
from tiny import VOCAB, make_evaluator, make_masks, make_model, make_rows

from distill.config.settings import BackendConfig, EvaluateConfig, PrecisionConfig, PseudoPerplexityConfig
from distill.distributed.single import Single
from distill.evaluation.evaluator import Evaluator
from distill.evaluation.pseudo_perplexity import SinglePass
from distill.evaluation.readers import MeanModel
from distill.evaluation.sets import EvaluationSet
from distill.evaluation.speed import tokens_per_second

WEIGHTS = (0.25, 0.75)
DATA = EvaluationSet("tiny", "", make_rows(6, shortest=5), 6)


@pytest.fixture
def evaluator(tokenizer: Any) -> Evaluator:
    settings = EvaluateConfig(batch_size=4, pseudo_perplexity=PseudoPerplexityConfig(fraction=1.0))
    masks = make_masks(tokenizer, DATA.sequences, mlm_probability=0.3)
    return make_evaluator(settings, masks, PrecisionConfig(), Single(BackendConfig(device="cpu")))


@pytest.fixture
def models() -> list[Any]:
    """Of two families, widths of the head's input and sizes of the embedding."""
    return [make_model("albert", 2, seed=3, vocab=VOCAB + 9), make_model("bert", 2, seed=4)]


def mean_log_probs(models: list[Any], ids: torch.Tensor, attention: torch.Tensor) -> torch.Tensor:
    """Over all rows of each model, of which tokens have the first."""
    with torch.no_grad():
        logits = [model(input_ids=ids, attention_mask=attention).logits.double() for model in models]
    return (
        torch.stack([w * each.softmax(-1)[..., :VOCAB] for w, each in zip(WEIGHTS, logits, strict=True)]).sum(0).log()
    )


def test_perplexities_are_those_of_the_mean(evaluator: Evaluator, models: list[Any]) -> None:
    mean = MeanModel(models, WEIGHTS)
    scores = evaluator.score(mean, "teacher", [DATA])
    masked = []
    for batch in evaluator.scoring.batches(DATA, lambda _: None):
        found = mean_log_probs(models, batch.ids, attention_of(batch)).flatten(0, 1)
        masked.append(found[batch.targets.positions, batch.targets.targets])
    assert scores["perplexity"]["tiny"] == pytest.approx(math.exp(-torch.cat(masked).mean()), rel=1e-5)
    single = evaluator.passes[1]
    assert isinstance(single, SinglePass)
    total, positions = 0.0, single.positions(DATA)
    for row, column in zip(*divmod(positions, DATA.sequences.shape[1]), strict=True):
        ids = torch.from_numpy(DATA.sequences[row].astype(np.int64))[None]
        attention = (ids != evaluator.scoring.collator.pad_id).long()
        target = int(ids[0, column])
        ids[0, column] = evaluator.scoring.collator.mask_id  # type: ignore[attr-defined]
        total -= float(mean_log_probs(models, ids, attention)[0, column, target])
    assert scores["pseudo_perplexity"]["tiny"] == pytest.approx(math.exp(total / len(positions)), rel=1e-5)
    assert not any(model.training for model in models)


def test_no_model_is_compiled_while_speed_is_measured(evaluator: Evaluator, models: list[Any]) -> None:
    """Training sends the student's forward alone through torch.compile, which would be its advantage."""
    plain, compiled = models
    encoder, calls = compiled.base_model, list[int]()
    encoder.forward = torch.compile(encoder.forward, backend=lambda graph, _: calls.append(1) or graph)
    forward = encoder.forward
    tokens_per_second(evaluator, [plain, compiled], DATA)
    assert not calls and encoder.forward is forward
    evaluator.score(compiled, "student", [DATA])
    assert calls
