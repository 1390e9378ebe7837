"""Measures of classes and values against plain loops and scipy: ties, degenerate sets and several classes included."""

import math
from collections.abc import Callable

import numpy as np
import pytest
from scipy import stats

from distill.data.tables import glue
from distill.evaluation.classes import MEASURES, OF_TABLES, ClassSet
from distill.evaluation.sets import NotFinite

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


NAIVE: dict[str, Callable[[Values, Values], float]] = {
    "accuracy": naive_accuracy,
    "f1": naive_f1,
    "macro_f1": naive_macro_f1,
    "matthews": naive_matthews,
    "pearson": lambda found, right: float(stats.pearsonr(found, right).statistic),
    "spearman": lambda found, right: float(stats.spearmanr(found, right).statistic),
}


def check(name: str, found: np.ndarray, right: np.ndarray) -> None:
    assert MEASURES[name](found, right) == pytest.approx(NAIVE[name](found.tolist(), right.tolist()), abs=1e-11)


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
    assert MEASURES[name](right, right) == pytest.approx(1, abs=1e-11)


def test_a_correlation_with_a_constant_is_none() -> None:
    for name in ("pearson", "spearman"):
        assert math.isnan(MEASURES[name](np.ones(4), np.arange(4.0)))


def a_set(values: bool = False) -> ClassSet:
    labels, classes = (np.array([0.5, 2.0, 4.5]), ()) if values else (np.array([0, 1, 1]), ("no", "yes"))
    given = {"labels": labels, "classes": classes, "measures": OF_TABLES[not values]}
    return ClassSet("dev", "", np.zeros((3, 4), np.uint16), 3, **given)


def test_a_set_scores_outputs() -> None:
    scores = a_set().scores(np.array([[2.0, 1.0], [0.0, 1.0], [3.0, 1.0]], np.float32))
    assert set(scores) == {"accuracy", "macro_f1"} and scores["accuracy"] == pytest.approx(200 / 3)
    scores = a_set(values=True).scores(np.array([[1.0], [2.0], [3.0]], np.float32))
    assert set(scores) == {"pearson", "spearman"} and scores["spearman"] == pytest.approx(100)
    with pytest.raises(NotFinite):
        a_set().scores(np.where(np.eye(3, 2) > 0, np.nan, 0))
