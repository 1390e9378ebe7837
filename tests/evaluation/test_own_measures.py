"""Measures of the user's: their value, their name, and what is refused before anything is trained."""

from typing import Any

import pytest
import torch
from job import composed
from test_scores import MODEL, SET, make, silent

from distill.checks import check
from distill.config.component import Component
from distill.config.settings import EvaluateConfig
from distill.evaluation.evaluator import Evaluator
from distill.evaluation.own_measures import check_measures
from distill.runtime.errors import SettingError


def own(target: str, **arguments: Any) -> dict[str, Component]:
    return {"accuracy": Component("evaluate.measures.accuracy", target, arguments)}


def evaluator(tokenizer: Any, measures: dict[str, Component], batch_size: int = 32) -> Evaluator:
    known = make(tokenizer, batch_size)
    settings = EvaluateConfig(batch_size=batch_size, measures=measures)
    return Evaluator(settings, known.scoring, known.own, known.precision)


@pytest.mark.parametrize("batch_size", [1, 4, 32])
def test_the_mean_over_the_positions_of_perplexity(tokenizer: Any, batch_size: int) -> None:
    made = evaluator(tokenizer, own("own_parts.Hits", best=12), batch_size)
    assert [measure.name for measure in made.measures] == ["perplexity", "pseudo_perplexity", "accuracy"]
    hits = []
    for batch in make(tokenizer).scoring.batches(SET, silent):
        positions, targets = batch.targets
        with torch.no_grad():
            logits = MODEL(batch.ids, attention_mask=(batch.ids != tokenizer.pad_token_id).long()).logits
        rows = logits.flatten(0, 1)[positions]
        hits += [int(target) in row.topk(12).indices for row, target in zip(rows, targets, strict=True)]
    assert 0 < sum(hits) < len(hits)
    assert made.score(MODEL, "student", [SET])["accuracy"] == {"small": pytest.approx(sum(hits) / len(hits))}


@pytest.mark.parametrize(
    ("name", "measure", "words"),
    [
        ("loss", own("own_parts.Hits")["accuracy"], ["results have another loss"]),
        ("two words", own("own_parts.Hits")["accuracy"], ["letters, digits and underscores"]),
        ("accuracy", own("own_parts.Nothing")["accuracy"], ["_target_=own_parts.Nothing", "imported"]),
        ("accuracy", own("own_parts.Hits", worst=1)["accuracy"], ["accuracy.worst is no setting", "best"]),
        ("accuracy", own("own_parts.Hits", best="all")["accuracy"], ["accuracy.best", "all"]),
    ],
)
def test_what_cannot_be_a_measure_is_refused_early(name: str, measure: Component, words: list[str]) -> None:
    with pytest.raises(SettingError) as error:
        check_measures({name: measure})
    text = str(error.value)
    assert "\n" not in text and all(word in text for word in ["evaluate.measures.accuracy", *words]), text


def test_what_lacks_a_part_of_a_measure_is_refused(tokenizer: Any) -> None:
    with pytest.raises(SettingError, match=r"accuracy\._target_=own_parts\.Triangle gives no measure: it has no title"):
        evaluator(tokenizer, own("own_parts.Triangle"))


@pytest.mark.parametrize("given", ["3", "{kind: accuracy}", "{_target_: null}"])
def test_a_measure_needs_a_target(given: str) -> None:
    with pytest.raises(
        SettingError, match=r"evaluate\.measures\.mine names no measure.*evaluate\.measures\.mine\._target_"
    ):
        composed(f"+evaluate.measures.mine={given}")


def test_the_checks_of_a_run_look_at_measures() -> None:
    check(composed("+evaluate.measures.mine._target_=own_parts.Hits", "+evaluate.measures.mine.best=2"))
    with pytest.raises(SettingError, match=r"evaluate\.measures\.mine\._target_=own_parts\.Nothing"):
        check(composed("+evaluate.measures.mine._target_=own_parts.Nothing"))
