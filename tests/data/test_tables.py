"""Tables of the user's and GLUE's tasks: every form gives the same, and bad rows are counted or named, never scored."""

import gzip
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from questions import REAL

from distill.data.tables import LabelledTexts, glue
from distill.data.tables.glue import Glue
from distill.data.tables.table import Table, TableInMemory
from distill.runtime.errors import SettingError

RECORDS = [
    {"review": 'He said "no", twice.\nThen left.', "title": "One\ttab", "stars": "bad"},
    {"review": "Fine, really", "title": "Two", "stars": "good"},
    {"review": "Ünïcode 東京", "title": "Three", "stars": "bad"},
]
PLAIN = [{name: value.replace("\n", " ").replace("\t", " ") for name, value in each.items()} for each in RECORDS]
COLUMNS = {"text": "review", "second": "title", "label": "stars"}
USUAL = dict[str, Any]()


def read(
    path: Path | str,
    columns: dict[str, Any] = COLUMNS,
    training: bool = True,
    split: str = "train",
    classes: Any = None,
) -> LabelledTexts:
    like = None if classes is None else SimpleNamespace(classes=classes)
    return Table(path=str(path), split=split, **columns).read("data", training, like)


def quoted(value: str) -> str:
    return '"' + value.replace('"', '""') + '"'


def write_csv(path: Path, records: list[dict[str, str]]) -> None:
    lines = [",".join(records[0]), *(",".join(map(quoted, record.values())) for record in records)]
    path.write_text("\ufeff" + "\r\n".join(lines) + "\r\n", encoding="utf-8", newline="")


def write_tsv(path: Path, rows: list[list[str]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join("\t".join(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_every_form_of_file_gives_the_same(tmp_path: Path) -> None:
    write_csv(tmp_path / "a.csv", RECORDS)
    (tmp_path / "b.csv.gz").write_bytes(gzip.compress((tmp_path / "a.csv").read_bytes()))
    (tmp_path / "c.jsonl").write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(RECORDS), tmp_path / "d.parquet")
    tsv = write_tsv(tmp_path / "e.tsv", [list(PLAIN[0]), *(list(each.values()) for each in PLAIN)])
    expected = [(each["review"], each["title"]) for each in RECORDS]
    for name in ("a.csv", "b.csv.gz", "c.jsonl", "d.parquet"):
        found = read(tmp_path / name)
        assert list(zip(found.first, found.second or [], strict=True)) == expected
        assert found.classes == ("bad", "good") and found.labels.tolist() == [0, 1, 0]
    assert read(tsv).first == [each["review"] for each in PLAIN]  # a quotation mark is a character in TSV files
    assert read(tmp_path / "*.csv*").labels.tolist() == [0, 1, 0] * 2
    alone = read(tmp_path / "a.csv", {"text": "title", "label": "stars"})
    assert alone.second is None and alone.first == [each["title"] for each in RECORDS]


def test_rows_of_the_hub_with_names_of_classes(tmp_path: Path) -> None:
    kinds = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["neg", "pos"])})
    rows = datasets.Dataset.from_dict({"text": ["a", "b", "c"], "label": [1, 0, -1]}, features=kinds)
    rows.to_parquet(tmp_path / "train.parquet")
    found = Table(hub=str(tmp_path)).read("data", True)
    assert found.classes == ("neg", "pos") and found.labels.tolist() == [1, 0]
    assert found.left_out == {"no label": 1}


def test_classes_that_the_hub_numbers_keep_their_numbers(tmp_path: Path) -> None:
    """A teacher of that data set has its outputs in this order; one class does not occur."""
    names = ["world", "sports", " business", "science"]
    kinds = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=names)})
    rows = datasets.Dataset.from_dict({"text": ["a", "b", "c"], "label": [0, 2, 1]}, features=kinds)
    rows.to_parquet(tmp_path / "train.parquet")
    found = Table(hub=str(tmp_path)).read("data", True)
    assert found.classes == ("world", "sports", "business", "science") and found.labels.tolist() == [0, 2, 1]
    others = SimpleNamespace(classes=("business", "sports", "world"))  # of training on other data
    assert Table(hub=str(tmp_path)).read("data", False, others).labels.tolist() == [2, 0, 1]


def test_the_files_of_a_split_are_taken_from_a_folder(tmp_path: Path) -> None:
    for name, text in (("train.csv", "t"), ("dev.csv", "d"), ("test.csv", "x"), ("notes.csv", "n")):
        write_csv(tmp_path / name, [{"text": text, "label": "1"}, {"text": text, "label": "2"}])
    assert read(tmp_path, USUAL).first == ["t", "t"]
    assert read(tmp_path, USUAL, split="validation").first == ["d", "d"]
    (tmp_path / "dev.csv").unlink()
    with pytest.raises(SettingError, match=r"^data\.path=.*: no file of the split validation in this folder"):
        read(tmp_path, USUAL, split="validation")
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
    lines = [json.dumps({"text": "x", "label": label}) for label in labels]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    found = read(tmp_path / "a.jsonl", USUAL)
    assert found.classes == classes
    write_csv(tmp_path / "a.csv", [{"text": "x", "label": str(label)} for label in labels])
    assert read(tmp_path / "a.csv", USUAL).labels.tolist() == found.labels.tolist()
    like = SimpleNamespace(classes=tuple(f"{name}.0" if name.isdigit() else name for name in classes))
    assert read(tmp_path / "a.csv", USUAL).classes == classes
    assert len(Table(path=str(tmp_path / "a.csv")).read("data", False, found)) == len(labels)
    if isinstance(labels[0], float):  # a data set of the Hub may call its classes so
        assert Table(path=str(tmp_path / "a.csv")).read("data", False, like).labels.tolist() == found.labels.tolist()


def test_bad_rows_are_counted_in_training_and_named_in_evaluation(tmp_path: Path) -> None:
    rows = [["text", "label"], ["a", "1"], ["b"], ["c", ""], ["", "1"], ["d", "2"], ["e", "1", "2"]]
    path = write_tsv(tmp_path / "a.tsv", rows)
    found = read(path, USUAL)
    assert found.first == ["a", "d"]
    assert found.left_out == {"another number of fields than the header has": 2, "no label": 1, "no text": 1}
    line = r"^data: a\.tsv, line 3: another number of fields than the header has; mend that row [^\n]*$"
    with pytest.raises(SettingError, match=line):
        read(path, USUAL, training=False)
    kept = write_tsv(tmp_path / "b.tsv", [["text", "label"], ["", "1"], ["d", "2"]])
    assert read(kept, USUAL, training=False).first == ["", "d"]  # a model has to answer all the same


def test_classes_of_an_evaluation_set_are_those_of_training(tmp_path: Path) -> None:
    path = write_tsv(tmp_path / "a.tsv", [["text", "label"], ["a", "y"], ["b", "x"], ["c", "new"]])
    with pytest.raises(SettingError, match=r"^data: a\.tsv, line 4: its class new is none of training's \(x, y, z\)"):
        read(path, USUAL, training=False, classes=("x", "y", "z"))
    path = write_tsv(tmp_path / "b.tsv", [["text", "label"], ["a", "z"]])
    assert read(path, USUAL, training=False, classes=("x", "y", "z")).labels.tolist() == [2]


def test_half_a_surrogate_pair_is_a_reason(tmp_path: Path) -> None:
    """JSON can write it, and no tokenizer reads it."""
    path = tmp_path / "a.jsonl"
    rows = [{"text": "a", "label": "x"}, {"text": "b", "label": "y"}, {"text": "c \ud800", "label": "x"}]
    path.write_text("\n".join(json.dumps(row) for row in [*rows, {"text": "d", "label": "\ud800"}]))
    reasons = {"half a surrogate pair in its text": 1, "half a surrogate pair in its label": 1}
    assert read(path, USUAL).left_out == reasons
    with pytest.raises(SettingError, match=r"row 3: half a surrogate pair in its text"):
        read(path, USUAL, training=False)


def test_values_whose_square_is_no_number_are_a_reason(tmp_path: Path) -> None:
    rows = [["text", "label"], ["a", "1e30"], ["b", "2"]]
    with pytest.raises(SettingError, match=r"its label is beyond 1e\+15, whose square fp32 cannot hold: scale the"):
        read(write_tsv(tmp_path / "a.tsv", rows), {"regression": True}, training=False)


def test_values(tmp_path: Path) -> None:
    columns = {"regression": True}
    rows = [["text", "label"], ["a", "3.5"], ["b", "-1e-2"], ["c", "nan"], ["d", "much"], ["e", ""]]
    found = read(write_tsv(tmp_path / "a.tsv", rows), columns)
    assert found.labels.dtype == np.float64 and found.labels.tolist() == [3.5, -0.01]
    assert found.classes == ()
    assert found.left_out == {"its label is not finite": 1, "its label is no number": 1, "no label": 1}
    with pytest.raises(SettingError, match=r"line 4: its label is not finite"):
        read(tmp_path / "a.tsv", columns, training=False)
    with pytest.raises(SettingError, match=r"^data\.label=label: it holds numbers such as .*data\.regression=true$"):
        read(write_tsv(tmp_path / "b.tsv", rows[:3]), USUAL)


def test_what_is_no_table_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "open.csv").write_text('text,label\n"never closed,1\n')
    (tmp_path / "broken.jsonl").write_text('{"text": "a", "label": 1}\n{')
    (tmp_path / "number.jsonl").write_text('{"text": 3, "label": 1}')
    (tmp_path / "nothing.jsonl").write_text("{}")
    (tmp_path / "latin.csv").write_bytes("text,label\ncaf\xe9,1\n".encode("latin-1"))
    (tmp_path / "a.xlsx").write_bytes(b"x")
    (tmp_path / "empty.csv").write_text("text,label\n")
    (tmp_path / "single.csv").write_text("text,label\na,1\nb,1\n")
    (tmp_path / "other.csv").write_text("body,label\na,1\n")
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a"]}), tmp_path / "other.parquet")
    for name, line in {
        "open.csv": r"open\.csv: line 2: unexpected end of data; mend or remove that",
        "broken.jsonl": r"line 2: not JSON",
        "number.jsonl": r"data\.text=text: in number\.jsonl, row 1 it holds int, not text",
        "nothing.jsonl": r"data\.text=text: nothing\.jsonl has no such field; it has none$",
        "latin.csv": "not UTF-8",
        "a.xlsx": "its name has none of the endings",
        "empty.csv": "not one row to use: it is empty",
        "single.csv": r"data\.label=label: its only class is 1; two are needed",
        "other.csv": r"data\.text=text: other\.csv has no such field; it has body, label",
        "other.parquet": r"data\.label=label: other\.parquet has no such field; it has text",
    }.items():
        with pytest.raises(SettingError, match=line) as caught:
            read(tmp_path / name, USUAL)
        assert "\n" not in str(caught.value) and str(caught.value).startswith("data")


# One row of each of GLUE's own files, and the same of the Hub's.
GLUE: dict[str, tuple[list[list[str]], dict[str, Any], list[str], float]] = {
    "sst2": ([["sentence", "label"], ["fine", "1"]], {"sentence": "fine", "label": 1}, ["fine"], 1),
    "mrpc": (
        [["Quality", "#1 ID", "#2 ID", "#1 String", "#2 String"], ["0", "7", "8", 'a "b', "c"]],
        {"sentence1": 'a "b', "sentence2": "c", "label": 0},
        ['a "b', "c"],
        0,
    ),
    "rte": (
        [["index", "sentence1", "sentence2", "label"], ["0", "a", "b", "not_entailment"]],
        {"sentence1": "a", "sentence2": "b", "label": 1},
        ["a", "b"],
        1,
    ),
    "cola": ([["gj04", "1", "", "They drank."]], {"sentence": "They drank.", "label": 1}, ["They drank."], 1),
    "mnli": (
        [
            ["index", "promptID", "genre", "sentence1", "sentence2", "label1", "gold_label"],
            ["0", "1", "fiction", "a", "b", "neutral", "contradiction"],
        ],
        {"premise": "a", "hypothesis": "b", "label": 2},
        ["a", "b"],
        2,
    ),
    "qnli": (
        [["index", "question", "sentence", "label"], ["0", "a?", "b", "entailment"]],
        {"question": "a?", "sentence": "b", "label": 0},
        ["a?", "b"],
        0,
    ),
    "qqp": (
        [["id", "qid1", "qid2", "question1", "question2", "is_duplicate"], ["0", "1", "2", "a?", "b?", "1"]],
        {"question1": "a?", "question2": "b?", "label": 1},
        ["a?", "b?"],
        1,
    ),
    "stsb": (
        [
            [
                "index",
                "genre",
                "filename",
                "year",
                "old_index",
                "source1",
                "source2",
                "sentence1",
                "sentence2",
                "score",
            ],
            ["0", "main", "f", "2012", "1", "none", "none", "a", "b", "3.800"],
        ],
        {"sentence1": "a", "sentence2": "b", "label": 3.8},
        ["a", "b"],
        3.8,
    ),
}


@pytest.mark.parametrize("name", glue.TASKS)
def test_tasks_of_glue_in_their_own_files_and_the_hubs(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = glue.TASKS[name]
    rows, record, texts, label = GLUE[name]
    split = task.validation[-1]
    write_tsv(tmp_path / "glue" / task.folder / f"{split.replace('validation', 'dev')}.tsv", rows)
    (tmp_path / "hub" / name).mkdir(parents=True)
    rows_of_hub = pyarrow.Table.from_pylist([record | {"idx": 0}])
    pyarrow.parquet.write_table(rows_of_hub, tmp_path / "hub" / name / f"{split}-00000-of-00001.parquet")
    monkeypatch.setenv("DISTILL_DATA", str(tmp_path))
    places = (None, tmp_path / "glue", tmp_path / "glue" / task.folder, tmp_path / "hub")
    for where in places:
        found = Glue(name, path=where and str(where), split=split).read("glue.dev", training=False)
        assert found.first == texts[:1] and found.second == (texts[1:] or None)
        assert found.labels.tolist() == [label] and found.classes == task.classes


def test_mnli_has_two_development_sets(tmp_path: Path) -> None:
    header, row = GLUE["mnli"][0]
    for name in ("dev_matched", "dev_mismatched", "train"):
        write_tsv(tmp_path / f"{name}.tsv", [header, [*row[:3], name, *row[4:]]])

    def first(split: str) -> list[str]:
        return Glue("mnli", path=str(tmp_path), split=split).read("glue.dev", False).first

    assert first("validation_matched") == ["dev_matched"] and first("validation_mismatched") == ["dev_mismatched"]
    assert first("train") == ["train"]
    with pytest.raises(
        SettingError, match=r"^glue\.dev\.split=validation: MNLI has several; set it to validation_matched"
    ):
        first("validation")


def test_glue_refuses_what_it_cannot_score(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^task=wnli is no task of GLUE here: choose one of sst2, mrpc"):
        Glue("wnli")
    rows = [["index", "sentence1", "sentence2", "label"], ["0", "a", "b", "entailment"], ["1", "a", "b", "perhaps"]]
    write_tsv(tmp_path / "train.tsv", rows)

    def read_rte(training: bool, split: str = "train") -> LabelledTexts:
        return Glue("rte", path=str(tmp_path), split=split).read("glue.rte", training)

    assert read_rte(True).left_out == {"its label perhaps is none of entailment, not_entailment": 1}
    with pytest.raises(SettingError, match=r"^glue\.rte: train\.tsv, line 3: its label perhaps is none of"):
        read_rte(False)
    write_tsv(tmp_path / "test.tsv", [each[:3] for each in rows])
    with pytest.raises(SettingError, match=r"^glue\.rte\.label=label: test\.tsv has no such field; it has index"):
        read_rte(False, "test")
    (tmp_path / "hub.jsonl").write_text(json.dumps({"sentence1": "a", "sentence2": "b", "label": -1}))
    with pytest.raises(SettingError, match=r"hub\.jsonl, row 1: no label"):
        Glue("rte", path=str(tmp_path / "hub.jsonl")).read("glue.rte", False)


@REAL
@pytest.mark.parametrize(
    ("name", "split", "count", "ones"),
    [
        ("sst2", "validation", 872, 444),
        ("mrpc", "train", 3667, 2473),
        ("mrpc", "validation", 408, 279),
        ("rte", "train", 2490, 1241),
        ("rte", "validation", 277, 131),
    ],
)
def test_real_tables(name: str, split: str, count: int, ones: int) -> None:
    found = Glue(name, split=split).read("glue", split == "train")
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
    rte, like = Glue("rte", path=str(write_tsv(tmp_path / "a.tsv", rows))), ("not_entailment", "entailment")
    assert rte.read("glue", True).labels.tolist() == [0, 1]
    examples = rte.read("glue", False, SimpleNamespace(classes=like))
    assert examples.labels.tolist() == [1, 0] and examples.classes == like


def test_one_class_is_enough_where_models_are_only_scored(tmp_path: Path) -> None:
    path = write_tsv(tmp_path / "a.tsv", [["text", "label"], ["a", "x"], ["b", "x"]])
    assert read(path, USUAL, training=False).classes == ("x",)
    with pytest.raises(SettingError, match=r"^data\.label=label: its only class is x; two are needed to learn$"):
        read(path, USUAL)


def test_several_labels_and_endless_numbers_are_reasons(tmp_path: Path) -> None:
    path, labels = tmp_path / "a.jsonl", ["x", "y", ["x", "y"], {"x": 1}]
    path.write_text("\n".join(json.dumps({"text": "a", "label": label}) for label in labels))
    assert read(path, USUAL).left_out == {"several labels, where one class is learnt": 2}
    with pytest.raises(SettingError, match=r"row 3: several labels, where one class is learnt; mend that row"):
        read(path, USUAL, training=False)
    path.write_text("\n".join(json.dumps({"text": "a", "label": label}) for label in (1, 10**309)))
    assert read(path, {"regression": True}).left_out == {"its label is not finite": 1}


def test_a_record_may_lack_a_field_that_the_first_one_has(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    rows = [{"text": "a", "label": "x"}, {"text": "b", "label": "y"}, {"text": "c"}, {"label": "x"}]
    path.write_text("\n".join(map(json.dumps, rows)))
    assert read(path, USUAL).left_out == {"no label": 1, "no text": 1}
    with pytest.raises(SettingError, match=r"^data: a\.jsonl, row 3: no label; mend that row"):
        read(path, USUAL, training=False)
    path.write_text("\n".join(map(json.dumps, rows[::-1])))
    with pytest.raises(SettingError, match=r"^data\.text=text: a\.jsonl has no such field; it has label$"):
        read(path, USUAL)


def test_a_row_of_the_hub_that_is_not_utf_8_is_one_line() -> None:
    text = pyarrow.Array.from_buffers(pyarrow.string(), 2, pyarrow.array([b"fine", b"\xff\xfe"]).buffers())
    held = datasets.Dataset(pyarrow.table({"text": text, "label": ["x", "y"]}))
    with pytest.raises(SettingError, match=r"^data\.hub=rows: row 2: not UTF-8 \(.*\); mend or remove that row$"):
        TableInMemory(hub="rows", held=held).read("data", True)
