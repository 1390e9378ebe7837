"""Measures of classes and values against plain loops and scipy; tables of which nothing can be learned or scored."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from job import composed
from labelled import mrpc
from scipy import stats
from vocabularies import vocabulary_of

from distill.data.tables import glue
from distill.data.tables.table import Table
from distill.distributed.single import Single
from distill.evaluation.classes import MEASURES, OF_TABLES, ClassSet
from distill.evaluation.sets import NotFinite
from distill.runtime.errors import SettingError
from distill.tasks import Prepared, find_task
from distill.tasks.classes import Classes

Values = list[float]


def naive_f1(found: Values, right: Values, number: float = 1) -> float:
    both = sum(f == r == number for f, r in zip(found, right, strict=True))
    either = sum(f == number for f in found) + sum(r == number for r in right)
    return 2 * both / either if either else 0.0


def naive_macro_f1(found: Values, right: Values) -> float:
    met = {*found, *right}
    return sum(naive_f1(found, right, number) for number in met) / len(met)


def naive_matthews(found: Values, right: Values) -> float:
    pairs = list(zip(found, right, strict=True))
    tp, tn, fp, fn = (pairs.count(pair) for pair in ((1, 1), (0, 0), (1, 0), (0, 1)))
    below = (tp + fp) * (tp + fn) * (tn + fp) * (tn + fn)
    return (tp * tn - fp * fn) / math.sqrt(below) if below else 0.0


NAIVE: dict[str, Callable[[Values, Values], float]] = {
    "accuracy": lambda found, right: sum(f == r for f, r in zip(found, right, strict=True)) / len(found),
    "f1": naive_f1,
    "macro_f1": naive_macro_f1,
    "matthews": naive_matthews,
    "pearson": lambda found, right: float(stats.pearsonr(found, right).statistic),
    "spearman": lambda found, right: float(stats.spearmanr(found, right).statistic),
}


def check(name: str, found: np.ndarray, right: np.ndarray) -> None:
    assert MEASURES[name](found, right) == pytest.approx(NAIVE[name](found.tolist(), right.tolist()), abs=1e-11)


@pytest.mark.parametrize("name", ["accuracy", "f1", "macro_f1", "matthews"])
def test_measures_of_classes(name: str) -> None:
    assert {name for task in glue.TASKS.values() for name in task.measures} <= set(MEASURES) == set(NAIVE)
    random = np.random.default_rng(0)
    for fraction in (0.02, 0.5, 0.97):
        for count in (5, 200, 1043):
            right = (random.random(count) < fraction).astype(np.int64)
            check(name, np.where(random.random(count) < 0.3, 1 - right, right), right)
    for found, right in ((0, 0), (0, 1)), ((1, 1), (0, 1)), ((0, 1), (1, 1)), ((0, 0), (0, 0)):
        check(name, np.tile(np.array(found), 50), np.tile(np.array(right), 50))  # it always says the same
    if name in ("accuracy", "macro_f1"):
        right = random.choice([0, 1, 2, 4], 300)  # class 3 is nowhere
        check(name, np.where(random.random(300) < 0.5, random.choice([0, 1, 2, 4], 300), right), right)


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
    assert MEASURES[name](np.ones(4), np.arange(4.0)) == MEASURES[name](np.arange(4.0), np.ones(4)) == 0


@pytest.mark.parametrize(
    ("labels", "classes", "outputs", "name", "value"),
    [
        (np.array([0, 1, 1]), ("no", "yes"), [[2.0, 1.0], [0.0, 1.0], [3.0, 1.0]], "accuracy", 200 / 3),
        (np.array([0.5, 2.0, 4.5]), (), [[1.0], [2.0], [3.0]], "spearman", 100),
    ],
)
def test_a_set_scores_outputs(labels: Any, classes: tuple[str, ...], outputs: Any, name: str, value: float) -> None:
    names = OF_TABLES[bool(classes)]
    data = ClassSet("dev", "", np.zeros((3, 4), np.uint16), 3, labels=labels, classes=classes, measures=names)
    scores = data.scores(np.array(outputs, np.float32))
    assert {*scores} == {*names} and scores[name] == pytest.approx(value)
    with pytest.raises(NotFinite):
        data.scores(np.full((3, len(outputs[0])), np.nan))


# --- tables

WORDS = ["a river", "the house of the king", "an old letter", "winter", "the captain and a ship", "the quiet road"]
OTHERS = [f"not {words}" for words in WORDS[::-1]]  # which are not trained on
VALUES = [1.0, 2.5, 3.0, 0.5, 4.0, 2.0]
REGRESSION = "corpus.regression=true"


def write(path: Path, labels: list[Any], texts: list[str] = WORDS) -> Path:
    rows = [f"{text}\t{label}\n" for text, label in zip(texts, labels, strict=False)]
    path.write_text("text\tlabel\n" + "".join(rows))
    return path


def prepared(*overrides: str) -> Prepared:
    """What a run reads before it trains."""
    config = composed(*overrides, "student.path=x", "corpus.sequence_length=16")
    return find_task("classes").read(config).prepare(config, vocabulary_of("bert"), Single(config.backend))


def of_table(train: Path, dev: Path, *more: str) -> Prepared:
    return prepared("+recipe=table", f"corpus.path={train}", f"evaluate.sources.dev.path={dev}", *more)


def test_tables_of_which_nothing_can_be_learned_or_scored(tmp_path: Path) -> None:
    """Where all values, all labels or all texts of a set are the same."""
    values, same = write(tmp_path / "a.tsv", VALUES, WORDS[::-1]), write(tmp_path / "same.tsv", [3.0] * 6, OTHERS)
    one, text = write(tmp_path / "one.tsv", [3.0], OTHERS), write(tmp_path / "text.tsv", VALUES, ["no winter"] * 6)
    for train in (same, one):
        with pytest.raises(SettingError, match=r"^corpus\.label=label: .*, and the only value is 3; two are needed"):
            of_table(train, values, REGRESSION)
    for dev in (same, one, text):
        with pytest.raises(SettingError, match=rf"^evaluate\.sources\.dev\.label=label: .* of {dev.name}, .* pearson"):
            of_table(values, dev, REGRESSION)
    assert len(of_table(values, write(tmp_path / "c.tsv", [9, 8], OTHERS), REGRESSION).sets) == 1


def test_accuracy_is_there_for_one_class_and_other_measures_are_not(tmp_path: Path) -> None:
    train, dev = write(tmp_path / "a.tsv", [0, 1] * 3), write(tmp_path / "b.tsv", [0] * 3, OTHERS)
    (data,) = of_table(train, dev).sets
    assert data.num_sequences == 3
    cola = [f"x\t{label}\t\t{text}\n" for label, text in zip([0, 1] * 3, WORDS, strict=True)]
    (tmp_path / "train.tsv").write_text("".join(cola))
    (tmp_path / "dev.tsv").write_text("".join(line.replace("\t\t", "\t\tno ") for line in cola[::-2]))
    with pytest.raises(SettingError, match=r"^evaluate\.sources\.dev: .*no model has a value of matthews there"):
        prepared("+recipe=glue", "corpus.task=cola", f"corpus.path={tmp_path}")


def test_a_column_that_is_there_twice(tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    file.write_text("text,other,other,label\na,1,2,x\nb,3,4,y\n")
    assert len(Table(path=str(file)).read("data", True)) == 2  # nobody reads it
    file.write_text("text,label,label\na,1,2\nb,3,4\n")
    for columns, words in (
        ({}, "label=label: a.csv has several"),
        ({"label": "text"}, "text=text: named twice"),
        ({"second": "label"}, "second=label: named twice"),
        ({"second": "text"}, "text=text: named twice"),
    ):
        with pytest.raises(SettingError, match=rf"^data\.{words}"):
            Table(path=str(file), **columns).read("data", True)


def sets_of(names: tuple[str, ...], *settings: str) -> tuple[Classes, list[Any]]:
    """The task for a model whose outputs have these names, and the sets that it is scored on."""
    config = composed(*settings, "student.path=x", "corpus.sequence_length=32")
    task = Classes().read(config, training=False).of_model(names)
    return task, task.evaluation_sets(config, vocabulary_of("bert"))[0]


@pytest.mark.parametrize("labels", [["yes", "no"] * 3, ["yes"] * 6])
def test_a_set_need_not_have_all_classes_of_the_model(labels: list[str], tmp_path: Path) -> None:
    """Each is its own number of the model's, also in a second set, with the same texts."""
    dev, names = write(tmp_path / "dev.tsv", labels), ("maybe", "no", "yes")
    other = f"+evaluate.sources.other={{kind: table, split: test, path: {dev}}}"
    task, found = sets_of(names, "+recipe=table", f"corpus.path={dev}", other, "evaluate.sets=[dev,other]")
    assert task.kind.fields["id2label"] == dict(enumerate(names)) and [data.name for data in found] == ["dev", "other"]
    assert all(data.labels.tolist() == [names.index(label) for label in labels] for data in found)


def test_f1_is_of_the_same_class_whatever_its_number_in_the_model(tmp_path: Path) -> None:
    """Half of the pairs are paraphrases, and so is every one by this model."""
    settings = ("+recipe=glue", "corpus.task=mrpc", f"corpus.path={mrpc(tmp_path / 'glue')}")
    for names in (("not_equivalent", "equivalent"), ("equivalent", "not_equivalent")):
        _, (data,) = sets_of(names, *settings)
        outputs = np.tile(np.array([name == "equivalent" for name in names], float), (8, 1))
        assert data.scores(outputs) == pytest.approx({"f1": 200 / 3, "accuracy": 50}, abs=1e-3)


def test_a_set_with_other_labels_than_those_learnt_is_refused(tmp_path: Path) -> None:
    train, values = write(tmp_path / "a.tsv", ["no", "yes"] * 3), write(tmp_path / "b.tsv", VALUES, OTHERS)
    (tmp_path / "dev.tsv").write_text("sentence\tlabel\nan owl\t0\nthe king\t1\n")
    glue_set = f"+evaluate.sources.glue={{kind: glue, task: sst2, split: validation, path: {tmp_path / 'dev.tsv'}}}"
    for settings, words in (
        (["evaluate.sources.dev.regression=true"], r"dev\.label=label: .* labels are values"),
        ([glue_set, "evaluate.sets=[glue]"], "glue: .* labels are negative, positive"),
    ):
        with pytest.raises(SettingError, match=rf"^evaluate\.sources\.{words}, and the student learns no, yes: choose"):
            of_table(train, values, *settings)
