"""Paired bootstrap resampling against a plain loop and on cases whose outcome is known; where documents end."""

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tiny
from tiny import PAD, make_masks
from vocabularies import vocabulary_of

from distill.config.settings import BackendConfig, EvaluateConfig, PrecisionConfig, PseudoPerplexityConfig
from distill.data.collate.clm import CausalLM
from distill.data.sequence_format import causal_format
from distill.distributed.single import Single
from distill.evaluation.classes import ClassSet
from distill.evaluation.sets import EvaluationSet
from distill.evaluation.significance import (
    FEWEST,
    RESAMPLES,
    SAMPLED,
    STRETCH,
    SequenceLosses,
    bootstrap_gap,
    compare_gaps,
    compare_models,
    paired_bootstrap,
    units_of,
)


def sums(seed: int, units: int = 30, effect: float = 0.0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Losses of two models by unit, of which the first is better by `effect` nats a token, and the tokens of each."""
    draw = np.random.default_rng(seed)
    counts = draw.integers(5, 60, units).astype(np.float64)
    second = counts * draw.uniform(3, 5, units)
    return second - counts * (effect + draw.normal(0, 0.2, units)), second, counts


@pytest.mark.parametrize("resamples", [1, 7, 300])
def test_it_is_that_of_a_plain_loop(resamples: int) -> None:
    """The same draws, each scored as a text of its own: two perplexities and their ratio."""
    first, second, counts = sums(0)
    found = paired_bootstrap(first, second, counts, resamples=resamples, seed=5)
    draws, ratios = np.random.default_rng(5).integers(30, size=(resamples, 30)), []
    for draw in draws:
        loss_of_first = loss_of_second = tokens = 0.0
        for unit in draw:
            loss_of_first, loss_of_second = loss_of_first + first[unit], loss_of_second + second[unit]
            tokens += counts[unit]
        ratios.append(math.exp(loss_of_first / tokens) / math.exp(loss_of_second / tokens))
    logs = sorted(math.log(ratio) for ratio in ratios)
    at = [0.025 * (resamples - 1), 0.975 * (resamples - 1)]
    low, high = (
        math.exp(logs[int(n)] + (n - int(n)) * (logs[min(int(n) + 1, resamples - 1)] - logs[int(n)])) for n in at
    )
    assert (found.low, found.high) == pytest.approx((low, high), rel=1e-12)
    wins = sum(ratio < 1 for ratio in ratios) + sum(ratio == 1 for ratio in ratios) / 2
    assert found.better == pytest.approx(wins / resamples)
    assert found.ratio == pytest.approx(math.exp((first.sum() - second.sum()) / counts.sum()), rel=1e-12)
    assert (found.num_units, found.resamples, found.units) == (30, resamples, "documents")


def test_the_gap_is_that_of_a_plain_loop_over_three_perplexities() -> None:
    """On the draws of `paired_bootstrap`, of texts whose teacher is always the better one."""
    student, baseline, counts = sums(0, effect=0.3)
    teacher = baseline - counts * 0.9
    found = bootstrap_gap(student, baseline, teacher, resamples=300, seed=5)
    fractions = []
    for draw in np.random.default_rng(5).integers(30, size=(300, 30)):
        logs = [math.log(math.exp(losses[draw].sum() / counts[draw].sum())) for losses in (student, baseline, teacher)]
        fractions.append((logs[1] - logs[0]) / (logs[1] - logs[2]))
    low, high = np.quantile(fractions, [0.025, 0.975])
    assert (found.low, found.high) == pytest.approx((low, high), rel=1e-9) and found.without_gap == 0
    whole = (baseline - student).sum() / (baseline - teacher).sum()
    assert found.low is not None and found.high is not None and 0 < found.low < whole < found.high < 1


def test_draws_without_a_gap_leave_no_interval_and_are_counted() -> None:
    """Quantiles of a fraction whose denominator goes through zero would be of no use."""
    student, baseline, counts = sums(0)
    teacher = baseline - counts * np.random.default_rng(1).normal(0.05, 0.3, len(counts))
    found = bootstrap_gap(student, baseline, teacher, resamples=300, seed=5)
    draws = np.random.default_rng(5).integers(30, size=(300, 30))
    expected = sum(baseline[draw].sum() <= teacher[draw].sum() for draw in draws)
    assert 0 < expected < 300 and (found.low, found.high, found.without_gap) == (None, None, expected)
    assert bootstrap_gap(student, baseline, baseline, resamples=300).without_gap == 300, "zero is no gap"


def test_equal_models_and_one_that_is_clearly_better() -> None:
    first, _, counts = sums(2)
    same = paired_bootstrap(first, first, counts)
    assert (same.ratio, same.low, same.high, same.better) == (1.0, 1.0, 1.0, 0.5), "a tie counts half"
    better = paired_bootstrap(*sums(2, effect=0.5))
    assert better.high < 1 and better.better == 1.0 and better.ratio == pytest.approx(math.exp(-0.5), rel=0.1)
    worse = paired_bootstrap(*sums(2, effect=-0.5))
    assert worse.low > 1 and worse.better == 0.0
    assert paired_bootstrap(*sums(2, effect=0.5)) == better, "seeded"


def test_the_interval_covers_what_it_promises() -> None:
    """Of many texts drawn from models that are equally good, about 95 of 100 intervals hold 1."""
    inside = 0
    for seed in range(200):
        found = paired_bootstrap(*sums(seed, units=40), resamples=400)
        inside += found.low <= 1 <= found.high
    assert 176 <= inside <= 199


def test_few_units_and_losses_that_are_no_numbers_say_nothing() -> None:
    data, scoring = rows_of([3] * 12), SimpleNamespace(collator_of=lambda data: None)

    def compared(losses: float, tokens: int) -> bool:
        counts = np.array([1.0] * tokens + [0.0] * (12 - tokens))
        one, other = (
            {("perplexity", "made"): SequenceLosses(each, counts)} for each in (np.arange(12.0), np.full(12, losses))
        )
        return bool(compare_models(one, other, [data], scoring))  # type: ignore[arg-type]

    assert compared(1.0, 12) and compared(1.0, 10) and not compared(math.nan, 12) and not compared(1.0, 9)


# --- units ---------------------------------------------------------------------------------------------------------


def rows_of(lengths: list[int], documents: int = 100, width: int = 8) -> EvaluationSet:
    """A sequence of each of these lengths, padded."""
    rows = np.full((len(lengths), width), PAD, np.uint16)
    for number, length in enumerate(lengths):
        rows[number, :length] = 7
    return EvaluationSet("made", "", rows, documents)


def test_a_document_ends_with_a_row_that_is_not_full(tokenizer: Any) -> None:
    masks = make_masks(tokenizer, np.zeros((1, 8), np.int64))
    lengths = [8, 8, 3] * 10 + [5] * 15
    units = units_of(rows_of(lengths), masks)
    assert units.name == "documents"
    assert units.of_row.tolist() == [n // 3 for n in range(30)] + list(range(10, 25))
    some = replace(rows_of(lengths), text=rows_of(lengths).sequences, numbers=np.arange(45))
    assert units_of(some, masks).of_row.tolist() == units.of_row.tolist()
    chosen = np.delete(np.arange(45), [1, 4, 29, 40])
    part = replace(some, sequences=some.sequences[chosen], numbers=chosen)
    owners = units.of_row[chosen]
    assert units_of(part, masks).of_row.tolist() == np.unique(owners, return_inverse=True)[1].tolist()


def test_of_few_documents_stretches_are_drawn(tokenizer: Any) -> None:
    masks = make_masks(tokenizer, np.zeros((1, 8), np.int64))
    books = units_of(rows_of([8] * 400 + [3], documents=5), masks)
    assert books.name == f"stretches of {STRETCH} sequences"
    assert books.of_row.tolist() == [n // STRETCH for n in range(401)]
    long = units_of(rows_of([8] * 400, documents=100), masks)  # sequences that run over the end of documents
    assert long.name == books.name
    chosen = np.sort(np.random.default_rng(0).permutation(401)[:60])
    text = rows_of([8] * 400 + [3], documents=5)
    some = units_of(replace(text, sequences=text.sequences[chosen], text=text.sequences, numbers=chosen), masks)
    assert some.name == SAMPLED, "most stretches have two or three rows there"
    assert some.of_row.tolist() == np.unique(chosen // STRETCH, return_inverse=True)[1].tolist()
    short = units_of(rows_of([8] * 60, documents=5), masks)
    assert short.name == "sequences" and short.of_row.tolist() == list(range(60))


def test_causal_documents_end_in_their_token() -> None:
    tokenizer = vocabulary_of("gpt2")
    format = causal_format(tokenizer)
    rows = np.full((3 * FEWEST, 4), 5, np.uint32)
    rows[2::3, 3] = format.document_end
    rows[1::3, 3] = format.document_end | (1 << 30)  # text that only looks like it
    data = EvaluationSet("made", "", rows, FEWEST)
    units = units_of(data, CausalLM(format, False))
    assert units.name == "documents" and units.of_row.tolist() == [n // 3 for n in range(3 * FEWEST)]
    assert units_of(data, CausalLM(format, True)).name == "sequences", "most documents end inside of rows there"


# --- losses by sequence


def test_losses_by_sequence_make_up_the_scores(tokenizer: Any) -> None:
    """Those of one sequence are what a set of that sequence alone has, at the positions of the same mask."""
    rows = tiny.make_rows(15, shortest=4)
    data, masks = EvaluationSet("small", "a small set", rows, 3), make_masks(tokenizer, rows, mlm_probability=0.3)
    settings = EvaluateConfig(batch_size=4, pseudo_perplexity=PseudoPerplexityConfig(fraction=1.0, batch_size=8))
    evaluator = tiny.make_evaluator(settings, masks, PrecisionConfig(), Single(BackendConfig(device="cpu")))
    models = [tiny.make_model("bert", layers) for layers in (1, 2)]
    (_, one), (scores, two) = (evaluator.score_by_sequence(model, "model", [data]) for model in models)
    for measure in ("perplexity", "pseudo_perplexity"):
        found = two[measure, "small"]
        assert found.losses.shape == (15,) and found.counts.sum() > 15
        assert math.exp(found.losses.sum() / found.counts.sum()) == pytest.approx(scores[measure]["small"], rel=1e-6)
    for number in (0, 7, 14):
        single = EvaluationSet("one", "", rows[number : number + 1], 1)
        _, alone = evaluator.score_by_sequence(models[1], "model", [single])
        of_one, of_all = alone["pseudo_perplexity", "one"], two["pseudo_perplexity", "small"]
        assert of_all.counts[number] == of_one.counts[0] > 0
        assert of_all.losses[number] == pytest.approx(of_one.losses[0], rel=1e-5)
    compared = compare_models(one, two, [data], evaluator.scoring)
    assert set(compared) == {"perplexity", "pseudo_perplexity"} and compared["perplexity"]["small"].units == "sequences"
    same = compare_models(one, one, [data], evaluator.scoring)["perplexity"]["small"]
    assert (same.low, same.high) == (1.0, 1.0)
    for student, baseline in ((two, one), (one, two)):  # the student is the teacher
        gap = compare_gaps(student, baseline, student, [data], evaluator.scoring)["perplexity"]["small"]
        assert gap.low is None if gap.without_gap else gap.low == 1
    assert compare_gaps(one, two, {}, [data], evaluator.scoring) == {}


def test_accuracies_differ_by_points_as_in_a_plain_loop() -> None:
    """Wrong answers of two classifiers on 200 examples, drawn example by example."""
    draw = np.random.default_rng(0)
    first, second = (draw.random(200) < rate for rate in (0.1, 0.3))
    given: dict[str, Any] = {"labels": np.zeros(200, np.int64), "classes": ("a", "b"), "measures": ("accuracy",)}
    data = ClassSet("dev", "", np.zeros((200, 4), np.uint16), 200, **given)
    models = [{("accuracy", "dev"): SequenceLosses(each.astype(float), np.ones(200))} for each in (first, second)]
    scoring = SimpleNamespace(collator_of=lambda data: None)
    found = compare_models(*models, [data], scoring)["accuracy"]["dev"]  # type: ignore[arg-type]
    numbers = np.random.default_rng(0).integers(200, size=(RESAMPLES, 200))
    points = [100 * (np.mean(~first[drawn]) - np.mean(~second[drawn])) for drawn in numbers]
    assert (found.low, found.high) == pytest.approx(tuple(np.quantile(points, [0.025, 0.975])), rel=1e-9)
    assert found.points == pytest.approx(100 * (second.mean() - first.mean())) and found.low < found.points < found.high
    assert found.ratio is None and found.better == pytest.approx(np.mean(np.array(points) > 0), abs=1e-9)
    assert (found.units, found.num_units) == ("examples", 200)
