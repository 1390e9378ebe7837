"""Measures of classes and values against plain loops in float64: ties, degenerate sets and several classes included."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from vocabularies import vocabulary_of

from distill.data.tables import LabelledTexts, glue
from distill.data.text_pairs import class_sequences
from distill.evaluation.measures.classes import MEASURES, ClassSet, class_set, measure
from distill.evaluation.measures.tables import TableScores

Values = list[float]


def naive_accuracy(found: Values, right: Values) -> float:
    return sum(f == r for f, r in zip(found, right, strict=True)) / len(found)


def naive_f1_of(found: Values, right: Values, number: int) -> float:
    both = sum(f == r == number for f, r in zip(found, right, strict=True))
    either = sum(f == number for f in found) + sum(r == number for r in right)
    return 2 * both / either if either else 0.0


def naive_f1(found: Values, right: Values) -> float:
    return naive_f1_of(found, right, 1)


def naive_macro_f1(found: Values, right: Values) -> float:
    met = {*found, *right}
    return sum(naive_f1_of(found, right, int(number)) for number in met) / len(met)


def naive_matthews(found: Values, right: Values) -> float:
    counts = {(f, r): 0 for f in (0, 1) for r in (0, 1)}
    for f, r in zip(found, right, strict=True):
        counts[int(f), int(r)] += 1
    tp, tn, fp, fn = counts[1, 1], counts[0, 0], counts[1, 0], counts[0, 1]
    below = (tp + fp) * (tp + fn) * (tn + fp) * (tn + fn)
    return (tp * tn - fp * fn) / math.sqrt(below) if below else 0.0


def naive_pearson(found: Values, right: Values) -> float:
    means = math.fsum(found) / len(found), math.fsum(right) / len(right)
    products = [((f - means[0]), (r - means[1])) for f, r in zip(found, right, strict=True)]
    covariance = math.fsum(f * r for f, r in products)
    return covariance / math.sqrt(math.fsum(f * f for f, _ in products) * math.fsum(r * r for _, r in products))


def naive_spearman(found: Values, right: Values) -> float:
    def ranks(values: Values) -> Values:
        return [sum(v < each for v in values) + (sum(v == each for v in values) + 1) / 2 for each in values]

    return naive_pearson(ranks(found), ranks(right))


NAIVE: dict[str, Callable[[Values, Values], float]] = {
    "accuracy": naive_accuracy,
    "f1": naive_f1,
    "macro_f1": naive_macro_f1,
    "matthews": naive_matthews,
    "pearson": naive_pearson,
    "spearman": naive_spearman,
}


def check(name: str, found: np.ndarray, right: np.ndarray) -> None:
    expected = 100 * NAIVE[name](found.tolist(), right.tolist())
    tolerance = 1e-5 if "f1" in name else 1e-9  # torchmetrics divides counts in float32
    assert measure(name, found, right) == pytest.approx(expected, abs=tolerance)


def test_every_measure_of_glue_is_there() -> None:
    assert {name for task in glue.TASKS.values() for name in task.measures} <= set(MEASURES) == set(NAIVE)


@pytest.mark.parametrize("name", ["accuracy", "f1", "macro_f1", "matthews"])
@pytest.mark.parametrize("share", [0.02, 0.5, 0.97])
def test_measures_of_two_classes(name: str, share: float) -> None:
    random = np.random.default_rng(0)
    for count in (5, 200, 1043):
        right = (random.random(count) < share).astype(np.int64)
        found = np.where(random.random(count) < 0.3, 1 - right, right)
        check(name, found, right)


@pytest.mark.parametrize("name", ["accuracy", "macro_f1"])
def test_measures_of_several_classes(name: str) -> None:
    random = np.random.default_rng(1)
    right = random.choice([0, 1, 2, 4], 300)  # class 3 is nowhere
    check(name, np.where(random.random(300) < 0.5, random.choice([0, 1, 2, 4], 300), right), right)


@pytest.mark.parametrize("name", ["f1", "matthews"])
@pytest.mark.parametrize(("found", "right"), [((0, 0), (0, 1)), ((1, 1), (0, 1)), ((0, 1), (1, 1)), ((0, 0), (0, 0))])
def test_a_model_that_always_says_the_same(name: str, found: tuple[int, int], right: tuple[int, int]) -> None:
    for times in (1, 50):
        check(name, np.tile(np.array(found), times), np.tile(np.array(right), times))


@pytest.mark.parametrize("name", ["pearson", "spearman"])
@pytest.mark.parametrize("ties", [True, False])
@pytest.mark.parametrize("offset", [0.0, 1000.0])
def test_correlations(name: str, ties: bool, offset: float) -> None:
    random = np.random.default_rng(2)
    right = random.random(300) * 5
    found = right + random.normal(size=300) + offset
    if ties:
        right, found = right.round(), found.round()
    check(name, found, right)
    check(name, -found, right)
    assert measure(name, right, right) == pytest.approx(100, abs=1e-9)


def test_a_correlation_with_a_constant_is_none() -> None:
    for name in ("pearson", "spearman"):
        assert math.isnan(measure(name, np.ones(4), np.arange(4.0)))


def a_set(values: bool = False) -> ClassSet:
    labels = np.array([0.5, 2.0, 4.5]) if values else np.array([0, 1, 1])
    texts = LabelledTexts("made", ["a", "b", "c"], None, labels, () if values else ("no", "yes"))
    return class_set("dev", texts, class_sequences(texts, vocabulary_of("bert"), 16, "max_length"))


def test_a_set_scores_outputs() -> None:
    data = a_set()
    assert (data.name, data.num_sequences, data.documents, data.description) == ("dev", 3, 3, "3 examples of made")
    scores = data.scores(np.array([[2.0, 1.0], [0.0, 1.0], [3.0, 1.0]], np.float32))
    assert set(scores) == {"accuracy", "macro_f1"} and scores["accuracy"] == pytest.approx(200 / 3)
    values = a_set(values=True)
    for outputs in (np.array([[1.0], [2.0], [3.0]], np.float32), np.array([1.0, 2.0, 3.0])):
        scores = values.scores(outputs)
        assert set(scores) == {"pearson", "spearman"} and scores["spearman"] == pytest.approx(100)


def test_outputs_that_cannot_be_read_are_refused() -> None:
    good = np.zeros((3, 2))
    for outputs, line in (
        (np.where(np.eye(3, 2) > 0, np.nan, good), "not finite"),
        (good[:2], r"shape \(2, 2\) for 3 texts of 2 classes"),
        (np.zeros((3, 3)), r"shape \(3, 3\)"),
    ):
        with pytest.raises(ValueError, match=line):
            a_set().scores(outputs)


@pytest.mark.parametrize("values", [False, True])
def test_outputs_that_are_not_finite_have_no_score(values: bool) -> None:
    """As of a model that has diverged; a run then says so itself."""
    data = a_set(values)
    scores = TableScores(data)
    outputs = torch.zeros(scores.outputs.shape)
    outputs[1, 0] = math.inf
    scores.update(outputs, torch.arange(3))
    found = scores.compute()
    assert tuple(found) == data.measures and all(math.isnan(value) for value in found.values())
