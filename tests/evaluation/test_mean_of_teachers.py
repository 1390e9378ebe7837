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
from distill.evaluation.measures.pseudo_perplexity import SinglePass
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


def mean_log_probs(
    models: list[Any], ids: torch.Tensor, attention: torch.Tensor, vocab: int | None = None
) -> torch.Tensor:
    """Over the first `vocab` rows of each model; None: over all of them, of which tokens have the first."""
    with torch.no_grad():
        logits = [model(input_ids=ids, attention_mask=attention).logits[..., :vocab].double() for model in models]
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


def test_agreement_and_speed_take_the_mean_for_the_teacher(evaluator: Evaluator, models: list[Any]) -> None:
    student, mean = make_model("distilbert", 1, seed=5).train(), MeanModel(models, WEIGHTS)
    found = evaluator.agree(student, mean, [DATA])["tiny"]
    divergences, alike = [], []
    student.eval()
    for batch in evaluator.scoring.batches(DATA, lambda _: None):
        log_p = mean_log_probs(models, batch.ids, attention_of(batch), VOCAB).flatten(0, 1)[batch.targets.positions]
        with torch.no_grad():
            logits = student(input_ids=batch.ids, attention_mask=attention_of(batch)).logits
        log_q = logits[..., :VOCAB].double().log_softmax(-1).flatten(0, 1)[batch.targets.positions]
        divergences.append((log_p.exp() * (log_p - log_q)).sum(-1))
        alike.append(log_p.argmax(-1) == log_q.argmax(-1))
    assert found["kl"] == pytest.approx(float(torch.cat(divergences).mean()), rel=1e-5)
    assert found["top1"] == pytest.approx(float(torch.cat(alike).double().mean()))
    assert all(speed > 0 for speed in tokens_per_second(evaluator, [mean, student], DATA))


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


def test_the_mean_of_one_model_with_itself_is_that_model(evaluator: Evaluator, models: list[Any]) -> None:
    twice = evaluator.score(MeanModel([models[1]] * 2, WEIGHTS), "teacher", [DATA])
    alone = evaluator.score(models[1], "teacher", [DATA])
    for measure in alone:
        assert twice[measure]["tiny"] == pytest.approx(alone[measure]["tiny"], rel=1e-5)
