"""Tables of the user's, GLUE's tasks and SQuAD: every form gives the same, and bad rows are counted or named."""

import csv
import gzip
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import numpy as np
import pandas
import pytest
import questions as sample
from questions import REAL

from distill.data.tables import LabelledTexts, glue
from distill.data.tables.glue import Glue
from distill.data.tables.squad import Questions, Squad, find
from distill.data.tables.table import Table, TableInMemory
from distill.evaluation.questions import raw_scores
from distill.runtime.errors import SettingError

RECORDS = [
    {"review": 'He said "no", twice.\nThen left.', "title": "One\ttab", "stars": "bad"},
    {"review": "Fine, really", "title": "007", "stars": "good"},
    {"review": "Ünïcode 東京", "title": "NA", "stars": "bad"},
]
COLUMNS = {"text": "review", "second": "title", "label": "stars"}


def read(path: Path | str, training: bool = True, classes: Any = None, **settings: Any) -> LabelledTexts:
    like = None if classes is None else SimpleNamespace(classes=classes)
    return Table(path=str(path), **settings).read("data", training, like)


def write_csv(path: Path, records: list[dict[str, str]]) -> Path:
    with path.open("w", encoding="utf-8-sig", newline="") as file:
        writer = csv.DictWriter(file, [*records[0]], quoting=csv.QUOTE_ALL)
        writer.writeheader()
        writer.writerows(records)
    return path


def write_tsv(path: Path, *rows: list[str]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join("\t".join(row) + "\n" for row in rows), encoding="utf-8")
    return path


def write_json(path: Path, records: list[Any]) -> Path:
    path.write_text("\n".join(map(json.dumps, records)))
    return path


def test_every_form_of_file_gives_the_same(tmp_path: Path) -> None:
    write_csv(tmp_path / "a.csv", RECORDS)
    (tmp_path / "b.csv.gz").write_bytes(gzip.compress((tmp_path / "a.csv").read_bytes()))
    write_json(tmp_path / "c.jsonl", RECORDS)
    pandas.DataFrame(RECORDS).to_parquet(tmp_path / "d.parquet")
    expected = [(each["review"], each["title"]) for each in RECORDS]
    for name in ("a.csv", "b.csv.gz", "c.jsonl", "d.parquet"):
        found = read(tmp_path / name, **COLUMNS)
        assert found.texts == expected, name
        assert found.classes == ("bad", "good") and found.labels.tolist() == [0, 1, 0]
    assert read(tmp_path / "*.csv*", **COLUMNS).labels.tolist() == [0, 1, 0] * 2
    tsv = write_tsv(tmp_path / "[e].tsv", ["text", "label"], ['"No"', "1"], ['"yes"', "2"])
    assert read(tsv).first == ['"No"', '"yes"']  # a quotation mark is a character in TSV files
    assert read(tsv, quotes=True).first == ["No", "yes"]


def test_classes_that_a_data_set_numbers_keep_their_numbers(tmp_path: Path) -> None:
    """A teacher of that data set has its outputs in this order; one class does not occur, one row has none."""
    kinds = {
        "text": datasets.Value("string"),
        "label": datasets.ClassLabel(names=["world", "sports", " business", "x"]),
    }
    rows = datasets.Dataset.from_dict({"text": ["a", "b", "c"], "label": [0, 2, -1]}, datasets.Features(kinds))
    hub, saved = str(tmp_path / "hub"), str(tmp_path / "saved")
    rows.to_parquet(f"{hub}/train.parquet")
    rows.save_to_disk(saved)
    in_memory = TableInMemory(hub="rows", held=rows)
    for split in (Table(hub=hub), Table(path=hub), Table(hub=saved), in_memory):
        found = split.read("data", True)
        assert found.classes == ("world", "sports", "business", "x")
        assert found.labels.tolist() == [0, 2] and found.left_out == 1
    others = SimpleNamespace(classes=("business", "sports", "world"))  # of training on other data
    assert replace(in_memory, held=rows.select([0, 1])).read("data", False, others).labels.tolist() == [2, 0]
    with pytest.raises(SettingError, match=r"^data\.hub=.* cannot be loaded: .*; check the names and the network"):
        Table(hub=hub, split="other").read("data", True)


def test_the_files_of_a_split_are_taken_from_a_folder(tmp_path: Path) -> None:
    (tmp_path / ".ipynb_checkpoints").mkdir()  # hidden copies are no part of a split
    for name in ("train", "dev", "notes", ".ipynb_checkpoints/train-checkpoint"):
        write_csv(tmp_path / f"{name}.csv", [{"text": name, "label": "1"}, {"text": name, "label": "2"}])
    assert read(tmp_path).first == ["train"] * 2 and read(tmp_path, split="validation").first == ["dev"] * 2
    with pytest.raises(SettingError, match=r"^data\.path=.*: no file of the split test in this folder"):
        read(tmp_path, split="test")
    with pytest.raises(SettingError, match=r"^data\.path=null: no examples were found; give data\.path, or"):
        Table().read("data", True)


@pytest.mark.parametrize(
    ("labels", "classes"),
    [
        ([10, 9, 2, 2], ("2", "9", "10")),
        ([1.0, 0.0, 1.0, 1.0], ("0", "1")),
        ([-1.0, 10.0, 2.0, 2.0], ("-1", "2", "10")),
        (["1.", "0.00", "b", "b"], ("0", "1", "b")),
        ([True, False, True, True], ("False", "True")),
        (["b", " a ", "b", "10"], ("10", "a", "b")),
    ],
)
def test_classes_are_sorted_and_the_same_in_every_form(tmp_path: Path, labels: list[Any], classes: tuple[str]) -> None:
    found = read(write_json(tmp_path / "a.jsonl", [{"text": "x", "label": label} for label in labels]))
    assert found.classes == classes
    path = write_csv(tmp_path / "a.csv", [{"text": "x", "label": str(label)} for label in labels])
    assert read(path).labels.tolist() == found.labels.tolist()
    assert len(read(path, False, found.classes)) == len(labels)
    if isinstance(labels[0], float):  # a data set of the Hub may call its classes so
        like = tuple(f"{name}.0" for name in classes)
        assert read(path, False, like).labels.tolist() == found.labels.tolist()


def test_bad_rows_are_counted_in_training_and_named_in_evaluation(tmp_path: Path) -> None:
    path = write_tsv(tmp_path / "a.tsv", ["text", "label"], ["a", "1"], ["b"], ["c", ""], ["", "1"], ["d", "2"])
    found = read(path)
    assert found.first == ["a", "d"] and found.left_out == 3
    assert found.describe() == "2 examples of a.tsv; 3 left out, without a text or label that can be used"
    with pytest.raises(SettingError, match=r"^data: a\.tsv, row 2: no label; mend that row [^\n]*$"):
        read(path, training=False)
    kept = write_tsv(tmp_path / "b.tsv", ["text", "label"], ["", "1"], ["d", "2"])
    assert read(kept, training=False).first == ["", "d"]  # a model has to answer all the same
    several = [{"text": "a", "label": label} for label in ("x", "y", ["x", "y"], {"x": 1})]
    assert read(write_json(tmp_path / "a.jsonl", [*several, {"text": "c"}, {"label": "x"}])).left_out == 4


def test_classes_of_an_evaluation_set_are_those_of_training(tmp_path: Path) -> None:
    path = write_tsv(tmp_path / "a.tsv", ["text", "label"], ["a", "Z"], ["b", "x"], ["c", "new"])
    with pytest.raises(SettingError, match=r"^data: a\.tsv, row 3: its label new is none of x, y, z"):
        read(path, False, ("x", "y", "z"))
    assert read(path, False, ("new", "x", "y", "z")).labels.tolist() == [3, 1, 0]
    alone = write_tsv(tmp_path / "c.tsv", ["text", "label"], ["a", "x"], ["b", "x"])
    assert read(alone, training=False).classes == ("x",)  # enough where models are only scored


def test_values(tmp_path: Path) -> None:
    rows = [["text", "label"], ["a", "3.5"], ["b", "-1e-2"], ["c", "nan"], ["d", "much"], ["e", ""], ["f", "1e30"]]
    found = read(write_tsv(tmp_path / "a.tsv", *rows), regression=True)
    assert found.labels.dtype == np.float64 and found.labels.tolist() == [3.5, -0.01]
    assert found.classes == () and found.left_out == 4
    with pytest.raises(SettingError, match=r"^data\.label=label: it holds numbers such as .*data\.regression=true$"):
        read(write_tsv(tmp_path / "b.tsv", *rows[:3]))


BAD = {
    "long.tsv": ("text\tlabel\na\t1\nb\t1\t2\n", r"long\.tsv: .* line 3, saw 3; mend or remove that$"),
    "first.csv": ("text,label\na,1,2\n", r"first\.csv: Length of header"),
    "open.csv": ('text,label\n"never closed,1\n', r"open\.csv: .*EOF inside string starting at row 1"),
    "broken.jsonl": ('{"text": "a", "label": 1}\n\n{', r"broken\.jsonl: line 3: JSON parse error"),
    "half.jsonl": ('{"text": "a \\ud800", "label": 1}', r"half\.jsonl: .*surrogate pair"),
    "number.jsonl": ('{"text": 3, "label": 1}', r"^data\.text=text: number\.jsonl, row 1: it holds int, not text"),
    "latin.csv": (b"text,label\na,1\ncaf\xe9,1\n", r"latin\.csv: line 3: 'utf-8'"),
    "a.xlsx": ("x", r"its name ends in none of \*\.csv, "),
    "void.csv": ("", r"void\.csv: No columns to parse"),
    "void.jsonl": ("", r"it is empty; mend or remove that$"),
    "empty.csv": ("text,label\n", r"it is empty; mend or remove that$"),
    "bad.csv": ("text,label\na,\n", "not one row to use: no label"),
    "single.csv": ("text,label\na,1\nb,1\n", r"data\.label=label: its only class is 1; two are needed"),
    "other.csv": ("body,label\na,1\n", r"^data\.text=text: other\.csv: no such field; it has body, label"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_table_is_one_clear_line(tmp_path: Path, name: str, capfd: pytest.CaptureFixture[str]) -> None:
    content, line = BAD[name]
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(SettingError, match=line) as caught:
        read(tmp_path / name)
    assert "\n" not in str(caught.value) and str(caught.value).startswith("data")
    assert not capfd.readouterr().err  # of the library


@pytest.mark.parametrize("regression", [True, False])
def test_texts_without_labels_are_read_from_every_form(tmp_path: Path, regression: bool) -> None:
    """Whatever labels the files have: real ones, odd ones, none at all."""
    texts = ["a cat", "the old dog", "Ünïcode 東京"]
    pandas.DataFrame({"review": texts, "stars": None}).to_parquet(tmp_path / "a.parquet")
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress("\n  \n".join(["", *texts]).encode()))
    pandas.DataFrame({"stars": [0, 1, 0], "review": texts}).to_csv(tmp_path / "c.csv", index=False)
    write_json(tmp_path / "d.jsonl", [{"review": text, "stars": ["x"]} for text in texts])
    table = Table(text="review", label="stars", regression=regression)
    for name in ("a.parquet", "b.txt.gz", "c.csv", "d.jsonl"):
        found = table.read_unlabelled(str(tmp_path / name), "corpus.unlabelled")
        assert (found.first, found.second, len(found.labels)) == (texts, None, 0), name
    assert table.read_unlabelled(str(tmp_path), "x").describe() == f"12 examples of 4 files in {tmp_path.name}"
    (tmp_path / "validation.csv").write_text("review,stars\none,1\ntwo,2\n")
    with pytest.raises(SettingError, match=rf"^corpus\.unlabelled={tmp_path}: no file of the split unlabelled"):
        table.read_unlabelled(str(tmp_path), "corpus.unlabelled")
    (tmp_path / "unsupervised-00001.txt").write_text("most\n")
    assert table.read_unlabelled(str(tmp_path), "x").first == ["most"]
    pairs = write_json(tmp_path / "pairs.jsonl", [{"text": "a", "b": each} for each in ("b", " ", "", None)])
    assert Table(second="b").read_unlabelled(str(pairs), "x").texts == [("a", "b")]


# One row of each of GLUE's own files, and the same of the Hub's: header, row, texts and label there.
GLUE: dict[str, tuple[str, str, dict[str, str], float]] = {
    "sst2": ("sentence label", "fine 1", {"sentence": "fine"}, 1),
    "mrpc": ("Quality #1_ID #2_ID #1_String #2_String", '0 7 8 a_"b c', {"sentence1": 'a "b', "sentence2": "c"}, 0),
    "rte": ("index sentence1 sentence2 label", "0 a b not_entailment", {"sentence1": "a", "sentence2": "b"}, 1),
    "cola": ("", "gj04 1 * They_drank.", {"sentence": "They drank."}, 1),
    "mnli": ("index promptID genre sentence1 sentence2 label1 gold_label", "0 1 fiction a b neutral contradiction",
             {"premise": "a", "hypothesis": "b"}, 2),
    "qnli": ("index question sentence label", "0 a? b entailment", {"question": "a?", "sentence": "b"}, 0),
    "qqp": ("id qid1 qid2 question1 question2 is_duplicate", "0 1 2 a? b? 1",
            {"question1": "a?", "question2": "b?"}, 1),
    "stsb": ("index genre filename year old_index source1 source2 sentence1 sentence2 score",
             "0 main f 2012 1 none none a b 3.800", {"sentence1": "a", "sentence2": "b"}, 3.8),
}  # fmt: skip
SPACED = {"#1_ID": "#1 ID", "#2_ID": "#2 ID", "#1_String": "#1 String", "#2_String": "#2 String"}


def cells(line: str) -> list[str]:
    """The cells of a row above, in which _ stands for a blank where GLUE has one."""
    return [SPACED.get(cell, cell.replace("They_", "They ").replace("a_", "a ")) for cell in line.split(" ") if cell]


@pytest.mark.parametrize("name", glue.TASKS)
def test_tasks_of_glue_in_their_own_files_and_the_hubs(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = glue.TASKS[name]
    header, row, record, label = GLUE[name]
    split = task.validation[-1]
    rows = filter(None, map(cells, (header, row)))
    write_tsv(tmp_path / "glue" / task.folder / f"{split.replace('validation', 'dev')}.tsv", *rows)
    (tmp_path / "hub" / name).mkdir(parents=True)
    of_hub = pandas.DataFrame([record | {"label": label, "idx": 0}])
    of_hub.to_parquet(tmp_path / "hub" / name / f"{split}-00000-of-00001.parquet")
    monkeypatch.setenv("DISTILL_DATA", str(tmp_path))
    for where in (None, tmp_path / "glue", tmp_path / "glue" / task.folder, tmp_path / "hub"):
        found = Glue(task=name, path=where and str(where), split=split).read("glue.dev", training=False)
        assert found.texts == [tuple(record.values())]
        assert found.labels.tolist() == [label] and found.classes == task.classes


def test_splits_of_glue(tmp_path: Path) -> None:
    """MNLI has two development sets; what describes a split of MRPC is no part of it."""
    header, row = map(cells, GLUE["mnli"][:2])
    for name in ("dev_matched", "dev_mismatched", "train"):
        write_tsv(tmp_path / f"{name}.tsv", header, [*row[:3], name, *row[4:]])
    for split, name in (
        ("validation_matched", "dev_matched"),
        ("validation_mismatched", "dev_mismatched"),
        ("train",) * 2,
    ):
        assert Glue(task="mnli", path=str(tmp_path), split=split).read("glue.dev", False).first == [name]
    with pytest.raises(SettingError, match=r"^glue\.dev\.split=validation: MNLI has several; set it to validation_m"):
        Glue(task="mnli", path=str(tmp_path), split="validation").read("glue.dev", False)
    for name in ("dev.tsv", "dev-1.tsv"):
        write_tsv(tmp_path / "mrpc" / name, *map(cells, GLUE["mrpc"][:2]))
    write_tsv(tmp_path / "mrpc" / "dev_ids.tsv", ["1", "2"])
    examples = Glue(task="mrpc", path=f"{tmp_path}/mrpc", split="validation").read("glue.dev", False)
    assert examples.first == ['a "b'] * 2


def test_glue_refuses_what_it_cannot_score(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^task=wnli is no task of GLUE here: choose one of sst2, mrpc"):
        Glue(task="wnli")
    rows = [["index", "sentence1", "sentence2", "label"], ["0", "a", "b", "entailment"], ["1", "a", "b", "perhaps"]]
    write_tsv(tmp_path / "train.tsv", *rows)
    rte = Glue(task="rte", path=str(tmp_path))
    assert rte.read("glue.rte", True).left_out == 1
    with pytest.raises(SettingError, match=r"^glue\.rte: train\.tsv, row 2: its label perhaps is none of"):
        rte.read("glue.rte", False)
    write_tsv(tmp_path / "test.tsv", *(each[:3] for each in rows))
    with pytest.raises(SettingError, match=r"^glue\.rte\.label=label: test\.tsv: no such field.*; it has index"):
        replace(rte, split="test").read("glue.rte", False)
    write_json(tmp_path / "hub.jsonl", [{"sentence1": "a", "sentence2": "b", "label": -1}])
    with pytest.raises(SettingError, match=r"hub\.jsonl, row 1: no label"):
        Glue(task="rte", path=str(tmp_path / "hub.jsonl")).read("glue.rte", False)


@pytest.mark.parametrize(
    ("task", "lines", "texts"),
    [
        ("sst2", [["sentence", "label"], ["a cat", "1"]], [("a cat",)]),
        ("cola", [["index", "sentence"], ["0", "a cat"]], [("a cat",)]),  # the test set has a header
        ("cola", [["gj04", "1", "", "a cat"], ["gj04", "0", "*", "a dog"]], [("a cat",), ("a dog",)]),  # others none
        ("stsb", [["index", "sentence1", "sentence2"], ["0", '"a', "b"]], [('"a', "b")]),
    ],
)
def test_test_sets_and_training_sets_of_glue_without_labels(
    tmp_path: Path, task: str, lines: list[list[str]], texts: list[tuple[str, ...]]
) -> None:
    found = Glue(task=task).read_unlabelled(str(write_tsv(tmp_path / "test.tsv", *lines)), "x")
    assert found.texts == texts and not len(found.labels)


@REAL
@pytest.mark.parametrize(
    ("name", "split", "count", "ones"), [("sst2", "validation", 872, 444), ("mrpc", "train", 3667, 2473)]
)
def test_real_tables(name: str, split: str, count: int, ones: int) -> None:
    found = Glue(task=name, split=split).read("glue", split == "train")
    assert (len(found), int(found.labels.sum())) == (count, ones) and not found.left_out


def test_classes_are_numbered_as_others_by_their_names(tmp_path: Path) -> None:
    found = LabelledTexts("made", ["a", "b", "c"], None, np.array([0, 1, 0]), ("Good", "bad"))
    other = found.numbered_as(("bad", "fair", "good"))
    assert other.classes == ("bad", "fair", "Good") and other.labels.tolist() == [2, 0, 2]
    for classes in (("bad", "fine"), (), ("good", "GOOD", "bad")):  # one lacks, there are none, two are the same
        assert found.numbered_as(classes) is found
    values = replace(found, labels=np.array([1.0, 2.0, 3.0]), classes=())
    assert values.numbered_as(("bad", "good")) is values
    rows = [["sentence1", "sentence2", "label"], ["a", "b", "entailment"], ["a", "c", "not_entailment"]]
    rte, like = Glue(task="rte", path=str(write_tsv(tmp_path / "a.tsv", *rows))), ("not_entailment", "entailment")
    assert rte.read("glue", True).labels.tolist() == [0, 1]
    examples = rte.read("glue", False, SimpleNamespace(classes=like))
    assert examples.labels.tolist() == [1, 0] and examples.classes == like


def load(path: str | Path, version: str = "2.0", training: bool = True) -> Questions:
    return Squad(path=str(path), version=version).read("squad.train", training)


def one(tmp_path: Path, training: bool = True, **changes: Any) -> Questions:
    """A good question and one with these changes."""
    content = sample.official(sample.made(1, "1.1"))
    questions = content["data"][0]["paragraphs"][0]["qas"]
    questions.append(questions[0] | {"id": "changed"} | changes)
    return load(sample.write(tmp_path / "x.json", content), training=training)


@pytest.mark.parametrize("version", ["1.1", "2.0"])
def test_all_forms_give_the_same(tmp_path: Path, version: str) -> None:
    made = sample.made(50, version, words=[*sample.WORDS, *sample.ODD])
    flat = sample.flat(made)
    pandas.DataFrame(flat).to_parquet(tmp_path / "flat.parquet")
    (tmp_path / "hub").mkdir()
    sample.write(tmp_path / "hub/train.jsonl", flat)
    forms = [
        load(sample.write(tmp_path / "nested.json", sample.official(made)), version),
        load(sample.write(tmp_path / "data.json", {"data": flat}), version),
        load(tmp_path / "hub/train.jsonl", version),
        load(tmp_path / "flat.parquet", version),
        Squad(hub=str(tmp_path / "hub"), version=version).read("squad.train", True),
    ]
    assert all(found.questions == made.questions and found.left_out == 0 for found in forms)


def test_answers_are_placed_or_their_questions_left_out_in_training_alone(tmp_path: Path) -> None:
    context = "A cat and\na dog, a cat"
    assert find("cat", context, 19) == (19, 22)
    assert find("cat", context, 3) == find("cat", context, None) == find("cat", context, -7) == (2, 5)
    assert find("cat", context, 17) == (19, 22)  # nearest, where the place is somewhat off
    assert find("bird", context, 0) is None is find("Dog", context, 0) is find("", context, 0)
    lost = [{"text": "nowhere", "answer_start": 0}]
    found = one(tmp_path, answers=lost)
    assert len(found) == 1 and found.left_out == 1
    assert found.describe().endswith("1 question of x.json (v2.0); 1 left out, which cannot be used")
    found = one(tmp_path, training=False, answers=lost)
    assert len(found) == 2 and found.questions[1].answers[0].text == "nowhere"
    text, place = sample.made(1, "1.1").questions[0].answers[0]
    assert place is not None
    found = one(tmp_path, answers=[*lost, {"text": text, "answer_start": place[0]}])
    assert found.questions[1].place == place


def test_answers_that_are_none_are_not_learnt_and_are_scored_as_officially(tmp_path: Path) -> None:
    """Plausible answers to an impossible question, and an empty text in the place of no answer."""
    for changes in ({"is_impossible": True}, {"answers": [{"text": "", "answer_start": 0}]}):
        assert one(tmp_path, **changes).left_out == 1
        found = one(tmp_path, training=False, **changes)
        assert len(found) == 2 and len(found.questions[1].answers) == 1
    assert raw_scores(found, ["none", ""])[1].tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"question": " "}, "no question"),
        ({"question": "\ud800?"}, "'utf-8' codec can't encode"),
        ({"id": None}, "no id"),
        ({"answers": "text"}, "its answers are no list of texts with their places"),
        ({"answers": [{"answer_start": 3}]}, "its answers are no list of texts with their places"),
    ],
)
def test_bad_questions_are_counted_in_training_and_refused_in_evaluation(
    tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    assert one(tmp_path, **changes).left_out == 1
    with pytest.raises(SettingError, match=rf"^squad\.train: x\.json, question .*: {reason}.*; mend it [^\n]*$"):
        one(tmp_path, training=False, **changes)


def test_questions_without_answers_need_a_context_alone(tmp_path: Path) -> None:
    known = sample.made(20)
    bare = [{"context": each.context, "question": each.question} for each in known.questions]
    wrong = [each | {"id": "1", "answers": {"text": ["nowhere"], "answer_start": [7]}} for each in bare]
    official = sample.write(tmp_path / "train-v2.0.json", sample.official(known))
    for path in (official, sample.write(tmp_path / "wrong.jsonl", wrong)):
        found = Squad(version="1.1").read_unlabelled(path, "corpus.unlabelled")
        assert found.texts == known.texts and not any(each.answers for each in found.questions)
    found = Squad().read_unlabelled(sample.write(tmp_path / "d.jsonl", [*bare, bare[0] | {"question": None}]), "x")
    assert found.describe() == "20 questions of d.jsonl (v1.1); 1 left out, which cannot be used"


@pytest.mark.parametrize(
    ("name", "content", "version", "line"),
    [
        ("train-v2.0.json", sample.official(sample.made(30)), "1.1", r"only files of another version than 1\.1"),
        ("mine.json", sample.official(sample.made(30)), "1.1", r"^squad\.train: \d+ of 30 questions have no answer"),
        ("mine.json", {}, "3", r"^squad\.train: version=3 is not known: choose 1\.1 or 2\.0"),
        ("broken.json", None, "2.0", r"broken\.json: not JSON"),
        ("other.json", {"rows": []}, "2.0", r"not in SQuAD's form, data > paragraphs > qas"),
        ("empty.json", {"data": []}, "2.0", r"has not one question to use: it is empty"),
        ("short.jsonl", [{"id": "1", "context": "a", "question": "b"}], "2.0", r"answers=answers: .*no such field"),
        ("none.json", "gone", "2.0", r"no such file or folder"),
    ],
)  # fmt: skip
def test_what_is_no_squad_is_one_clear_line(tmp_path: Path, name: str, content: Any, version: str, line: str) -> None:
    path = tmp_path / name
    if content != "gone":
        path.write_text("{") if content is None else sample.write(path, content)
    with pytest.raises(SettingError, match=line) as caught:
        load(path, version)
    assert str(caught.value).startswith("squad.train") and "\n" not in str(caught.value)


def test_versions_are_kept_apart_in_a_folder(tmp_path: Path) -> None:
    for version in ("1.1", "2.0"):
        sample.write(tmp_path / f"train-v{version}.json", sample.official(sample.made(30, version)))
    assert [load(tmp_path, version).name for version in ("1.1", "2.0")] == ["train-v1.1.json", "train-v2.0.json"]


@sample.REAL
@pytest.mark.parametrize(
    ("version", "split", "count"),
    [("1.1", "train", 4371), ("2.0", "validation", 6078)],
)
def test_real_questions(version: str, split: str, count: int) -> None:
    found = Squad(split=split, version=version).read("squad.train", split == "train")
    assert (len(found), found.left_out) == (count, 0)
