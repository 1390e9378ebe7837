"""Paired bootstrap resampling against a plain loop and on cases whose outcome is known; where documents end."""

import itertools
import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tiny
from scipy import stats
from tiny import PAD, make_masks
from vocabularies import vocabulary_of

from distill.config.settings import BackendConfig, EvaluateConfig, PrecisionConfig, PseudoPerplexityConfig
from distill.data.collate.clm import CausalLM
from distill.data.sequence_format import causal_format
from distill.distributed.single import Single
from distill.evaluation import classes as metrics
from distill.evaluation.classes import ClassSet
from distill.evaluation.sets import EvaluationSet
from distill.evaluation.significance import (
    FEWER_RESAMPLES,
    FEWEST,
    RATIO,
    RESAMPLES,
    SAMPLED,
    STRETCH,
    Paired,
    SequenceLosses,
    bootstrap_gap,
    compare_gaps,
    compare_models,
    conclude,
    paired_losses,
    units_of,
)


def sums(seed: int, units: int = 30, effect: float = 0.0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Losses of two models by unit, of which the first is better by `effect` nats a token, and the tokens of each."""
    draw = np.random.default_rng(seed)
    counts = draw.integers(5, 60, units).astype(np.float64)
    second = counts * draw.uniform(3, 5, units)
    return second - counts * (effect + draw.normal(0, 0.2, units)), second, counts


def pair(*losses: np.ndarray, unit: str = RATIO, resamples: int = 2000) -> Paired:
    """Models by their losses in units, and the tokens of these last."""
    return replace(paired_losses(losses[:-1], losses[-1], unit), resamples=resamples)


@pytest.mark.parametrize("resamples", [7, 300])
def test_it_is_that_of_a_plain_loop(resamples: int) -> None:
    """The same draws, each scored as a text of its own: two perplexities and their ratio."""
    first, second, counts = sums(0)
    found = conclude(pair(first, second, counts, resamples=resamples), seed=5)
    draws, ratios = np.random.default_rng(5).integers(30, size=(resamples, 30)), []
    for draw in draws:
        loss_of_first = loss_of_second = tokens = 0.0
        for unit in draw:
            loss_of_first, loss_of_second = loss_of_first + first[unit], loss_of_second + second[unit]
            tokens += counts[unit]
        ratios.append(math.exp(loss_of_first / tokens) / math.exp(loss_of_second / tokens))
    low, high = np.exp(np.quantile(np.log(ratios), [0.025, 0.975]))
    assert (found.low, found.high) == pytest.approx((low, high), rel=1e-12)
    assert found.difference == pytest.approx(math.exp((first.sum() - second.sum()) / counts.sum()), rel=1e-12)
    assert (found.n, found.unit, found.units) == (30, "ratio", "documents")


def test_the_gap_is_that_of_a_plain_loop_over_three_perplexities() -> None:
    """On the draws of `conclude`, of texts whose teacher is always the better one."""
    student, baseline, counts = sums(0, effect=0.3)
    teacher = baseline - counts * 0.9
    found = bootstrap_gap(pair(student, baseline, teacher, counts, resamples=300), seed=5)
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
    found = bootstrap_gap(pair(student, baseline, teacher, counts, resamples=300), seed=5)
    draws = np.random.default_rng(5).integers(30, size=(300, 30))
    expected = sum(baseline[draw].sum() <= teacher[draw].sum() for draw in draws)
    assert 0 < expected < 300 and (found.without_gap, found.low, found.high) == (expected, None, None)
    assert bootstrap_gap(pair(student, baseline, baseline, counts, resamples=300)).without_gap == 300, "zero is no gap"


def test_the_word_follows_from_the_interval() -> None:
    for effect, word in ((0.5, "helped"), (-0.5, "did not"), (0.0, "unclear")):
        found = conclude(pair(*sums(2, effect=effect)))
        assert found.word == word and found == conclude(pair(*sums(2, effect=effect))), "seeded"
        assert found.difference is not None and found.low is not None and found.high is not None
        numbers = f"{found.difference:.3f} times the perplexity, 95 % from {found.low:.3f} to {found.high:.3f}"
        assert found.reason == f"{numbers}, on 30 documents"
        assert word == ("helped" if found.high < 1 else "did not" if found.low > 1 else "unclear")


@pytest.mark.parametrize(
    ("losses", "reason"),
    [
        ((np.arange(9.0), np.ones(9), np.ones(9)), "too few documents, 9 of the 10 that are needed"),
        ((np.ones(1), np.zeros(1), np.ones(1)), "too few documents, 1 of the 10 that are needed"),
        ((np.arange(12.0), np.full(12, np.nan), np.ones(12)), "a model has no finite score on the set"),
        (
            (np.ones(12), np.ones(12), np.ones(12)),
            "1.000 times the perplexity, 95 % from 1.000 to 1.000, on 12 documents, none of",
        ),
    ],
)
def test_little_and_equal_losses_and_those_that_are_no_numbers_leave_it_unclear(losses: Any, reason: str) -> None:
    found = conclude(pair(*losses))
    assert found.word == "unclear" and found.reason.startswith(reason), found.reason


def test_the_interval_covers_what_it_promises() -> None:
    """Of many texts drawn from models that are equally good, about 95 of 100 intervals hold 1."""
    words = [conclude(pair(*sums(seed, units=40), resamples=400)).word for seed in range(200)]
    assert 176 <= words.count("unclear") <= 199


def test_accuracies_are_concluded_as_by_mcnemar() -> None:
    """Whatever numbers of examples one of two classifiers alone has right: by the exact test, but at its very edge."""
    for better, worse in itertools.product(range(0, 16), range(0, 8, 2)):
        wrong = np.zeros((2, 300))
        wrong[1, :better] = wrong[0, better : better + worse] = 1
        found = conclude(pair(*wrong, np.ones(300), unit="points"))
        p = stats.binomtest(better, better + worse).pvalue if better + worse else 1.0
        assert found.difference == pytest.approx(100 * (better - worse) / 300)
        if not 0.05 < p < 0.1:
            word = "unclear" if p > 0.05 else "helped" if better > worse else "did not"
            assert found.word == word, (better, worse, p)


@pytest.mark.parametrize("measure", ["f1", "matthews", "pearson"])
def test_a_measure_that_is_no_mean_is_computed_anew_for_each_draw(measure: str) -> None:
    draw = np.random.default_rng(0)
    labels = draw.integers(2, size=200)
    predicted = [np.where(draw.random(200) < rate, 1 - labels, labels) for rate in (0.1, 0.3)]
    given: dict[str, Any] = {"labels": labels, "classes": ("a", "b"), "measures": (measure,)}
    data = ClassSet("dev", "", np.zeros((200, 4), np.uint16), 200, **given)
    scoring = SimpleNamespace(collator_of=lambda data: None)
    models = [{(measure, "dev"): each} for each in predicted]
    found = compare_models(*models, [data], scoring)[measure]["dev"]  # type: ignore[arg-type]
    of = {"f1": metrics.f1, "matthews": metrics.matthews, "pearson": lambda x, y: stats.pearsonr(x, y).statistic}[
        measure
    ]
    draws = np.random.default_rng(0).integers(200, size=(FEWER_RESAMPLES, 200))
    points = [100 * (of(predicted[0][each], labels[each]) - of(predicted[1][each], labels[each])) for each in draws]
    assert (found.low, found.high) == pytest.approx(tuple(np.quantile(points, [0.025, 0.975])), rel=1e-9)
    assert (found.word, found.units, found.n) == ("helped", "examples", 200)


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
    assert found.difference == pytest.approx(100 * (second.mean() - first.mean()))
    assert (found.word, found.unit, found.units, found.n) == ("helped", "points", "examples", 200)
