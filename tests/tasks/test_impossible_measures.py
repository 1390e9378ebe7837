"""Tables of which nothing can be learned, or on which no model has a score, are refused; others are scored right."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from job import composed
from labelled import mrpc
from vocabularies import vocabulary_of

from distill.data.tables.table import Table
from distill.distributed.single import Single
from distill.runtime.errors import SettingError
from distill.tasks import Prepared, find_task
from distill.tasks.classes import Classes

WORDS = ["a river", "the house of the king", "an old letter", "winter", "the captain and a ship", "the quiet road"]
OTHERS = [f"not {words}" for words in WORDS[::-1]]  # which are not trained on
VALUES = [1.0, 2.5, 3.0, 0.5, 4.0, 2.0]


def write(path: Path, labels: list[Any], texts: list[str] = WORDS) -> Path:
    rows = [f"{text}\t{label}\n" for text, label in zip(texts, labels, strict=False)]
    path.write_text("text\tlabel\n" + "".join(rows))
    return path


def prepared(train: Path, dev: Path, *more: str) -> Prepared:
    """What a run reads before it trains."""
    config = composed(
        "+recipe=table", "student.path=x", f"corpus.path={train}", f"evaluate.sources.dev.path={dev}",
        "corpus.sequence_length=16", *more,
    )  # fmt: skip
    return find_task("classes").read(config).prepare(config, vocabulary_of("bert"), Single(config.backend))


REGRESSION = "corpus.regression=true"


@pytest.mark.parametrize("labels", [[3.0] * 6, [3.0]])
def test_values_that_are_all_the_same_are_not_trained_on(labels: list[float], tmp_path: Path) -> None:
    train, dev = write(tmp_path / "a.tsv", labels), write(tmp_path / "b.tsv", VALUES)
    message = rf"^corpus\.label=label: {len(labels)} examples? of a\.tsv, and the only value is 3; two are needed"
    with pytest.raises(SettingError, match=message):
        prepared(train, dev, REGRESSION)


@pytest.mark.parametrize(("labels", "texts"), [([3.0] * 6, OTHERS), ([3.0], OTHERS), (VALUES, ["no winter"] * 6)])
def test_sets_without_a_correlation(labels: list[float], texts: list[str], tmp_path: Path) -> None:
    train = write(tmp_path / "a.tsv", VALUES, WORDS[::-1])
    dev = write(tmp_path / "b.tsv", labels, texts)
    with pytest.raises(SettingError) as error:
        prepared(train, dev, REGRESSION)
    examples = f"{len(labels)} example{'s' * (len(labels) > 1)} of b.tsv"
    assert str(error.value) == (
        f"evaluate.sources.dev.label=label: {examples}, all with one text or one label, so no model has a value of "
        "pearson or spearman there: give examples with other texts and labels, or raise evaluate.max_sequences where "
        "it leaves the others out"
    )
    assert len(prepared(train, write(tmp_path / "c.tsv", [9, 8], OTHERS), REGRESSION).sets) == 1


def test_accuracy_is_there_for_one_class_and_other_measures_are_not(tmp_path: Path) -> None:
    train, dev = write(tmp_path / "a.tsv", [0, 1] * 3), write(tmp_path / "b.tsv", [0] * 3, OTHERS)
    (data,) = prepared(train, dev).sets
    assert data.num_sequences == 3
    cola = [f"x\t{label}\t\t{text}\n" for label, text in zip([0, 1] * 3, WORDS, strict=True)]
    (tmp_path / "train.tsv").write_text("".join(cola))
    (tmp_path / "dev.tsv").write_text("".join(line.replace("\t\t", "\t\tno ") for line in cola[::-2]))
    config = composed("+recipe=glue", "corpus.task=cola", "student.path=x", f"corpus.path={tmp_path}")
    with pytest.raises(SettingError, match=r"^evaluate\.sources\.dev: .*no model has a value of matthews there"):
        find_task("classes").read(config).prepare(config, vocabulary_of("bert"), Single(config.backend))


def test_a_column_that_is_there_twice(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text,other,other,label\na,1,2,x\nb,3,4,y\n")
    table = Table(path=str(tmp_path / "a.csv"))
    assert len(table.read("data", True)) == 2  # nobody reads it
    (tmp_path / "a.csv").write_text("text,label,label\na,1,2\nb,3,4\n")
    with pytest.raises(SettingError, match=r"^data\.label=label: a\.csv has several of this name"):
        table.read("data", True)
    for columns in ({"label": "text"}, {"second": "label"}, {"second": "text"}):
        with pytest.raises(SettingError, match=r"^data\.(text=text|second=label): named twice"):
            Table(path=str(tmp_path / "a.csv"), **columns).read("data", True)


def sets_of(names: tuple[str, ...], *settings: str) -> tuple[Classes, list[Any]]:
    """The task for a model whose outputs have these names, and the sets that it is scored on."""
    config = composed(*settings, "student.path=x", "corpus.sequence_length=32")
    task = Classes().read(config, training=False).of_model(names)
    return task, task.evaluation_sets(config, vocabulary_of("bert"))[0]


@pytest.mark.parametrize("labels", [["yes", "no"] * 3, ["yes"] * 6])
def test_a_set_need_not_have_all_classes_of_the_model(labels: list[str], tmp_path: Path) -> None:
    """Each is its own number of the model's, also in a second set, with the same texts."""
    dev = write(tmp_path / "dev.tsv", labels)
    other = f"+evaluate.sources.other={{kind: table, split: test, path: {dev}}}"
    names = ("maybe", "no", "yes")
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
    with pytest.raises(SettingError) as error:
        prepared(train, values, "evaluate.sources.dev.regression=true")
    assert str(error.value) == (
        "evaluate.sources.dev.label=label: 6 examples of b.tsv, whose labels are values, and the student learns no, "
        "yes: choose another set"
    )
    (tmp_path / "dev.tsv").write_text("sentence\tlabel\nan owl\t0\nthe king\t1\n")
    glue = f"+evaluate.sources.glue={{kind: glue, task: sst2, split: validation, path: {tmp_path / 'dev.tsv'}}}"
    line = r"^evaluate\.sources\.glue: .*, whose labels are negative, positive, and the student learns no, yes: choose"
    with pytest.raises(SettingError, match=line):
        prepared(train, values, glue, "evaluate.sets=[glue]")
