"""Examples without labels: read from every form of file, whatever labels these have, as rows behind those with some."""

import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import questions as sample
from test_class_sequences import made
from vocabularies import vocabulary_of

from distill.data.collate.tables import Classes, Spans
from distill.data.span_windows import SpanConfig, SpanWindows, span_windows
from distill.data.tables import LabelledTexts
from distill.data.tables.glue import Glue
from distill.data.tables.squad import Questions, Squad
from distill.data.tables.table import Table
from distill.data.text_pairs import class_sequences
from distill.runtime.errors import SettingError

SETTING = "corpus.unlabelled"
TEXTS = ["a cat", "the old dog", "Ünïcode 東京"]


def texts_of(split: Any, path: Path) -> LabelledTexts:
    found = split.read_unlabelled(str(path), SETTING)
    assert isinstance(found, LabelledTexts) and len(found.labels) == 0
    return found


def write(path: Path, *lines: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def forms(folder: Path) -> list[Path]:
    """The same texts in every form, in some with labels: real ones, odd ones, none at all."""
    records = [{"review": text, "stars": None} for text in TEXTS]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), folder / "a.parquet")
    (folder / "b.txt.gz").write_bytes(gzip.compress("\n\n".join(TEXTS).encode()))
    return [
        write(folder / "c.csv", "review", *TEXTS),
        write(folder / "d.csv", "stars,review", *(f"{number % 2},{text}" for number, text in enumerate(TEXTS))),
        write(folder / "e.tsv", "review\tstars", *(f"{text}\tnan" for text in TEXTS)),
        write(folder / "f.jsonl", *(json.dumps({"review": text, "stars": ["x"]}) for text in TEXTS)),
        write(folder / "g.txt", "", TEXTS[0], "  ", *TEXTS[1:]),
        folder / "a.parquet",
        folder / "b.txt.gz",
    ]


@pytest.mark.parametrize("regression", [True, False])
def test_every_form_of_a_table_gives_the_same(tmp_path: Path, regression: bool) -> None:
    table = Table(text="review", label="stars", regression=regression)
    for path in forms(tmp_path):
        found = texts_of(table, path)
        assert (found.first, found.second) == (TEXTS, None), path.name
        assert found.describe() == f"3 examples of {path.name}"
    whole = texts_of(table, tmp_path)
    assert len(whole) == 21 and whole.describe() == f"21 examples of 7 files in {tmp_path.name}"


def test_of_a_folder_with_other_splits_only_what_is_called_unlabelled(tmp_path: Path) -> None:
    write(tmp_path / "validation.csv", "text,label", "one,1", "two,2")
    with pytest.raises(SettingError, match=rf"^corpus\.unlabelled={tmp_path}: no file of the split unlabelled [^\n]*$"):
        texts_of(Table(), tmp_path)
    write(tmp_path / "unlabelled.csv", "text", "more")
    write(tmp_path / "unsupervised-00001.txt", "most")
    assert texts_of(Table(), tmp_path).first == ["more", "most"]
    assert Table(path=str(tmp_path), split="validation").read("corpus", training=True).first == ["one", "two"]


def test_what_holds_no_such_texts_is_one_clear_line(tmp_path: Path) -> None:
    lines = [json.dumps({"one": one, "other": other}) for one, other in (("a", "b"), ("a", " "), ("", "b"))]
    found = texts_of(Table(text="one", second="other"), write(tmp_path / "pairs.jsonl", *lines))
    assert found.texts == [("a", "b")] and found.left_out == 2
    for split, path, line in (
        (Table(), write(tmp_path / "none.csv", "text"), r"corpus\.unlabelled=.*none\.csv: it is empty"),
        (Table(), write(tmp_path / "other.csv", "review", "a"), r"corpus\.text=text: other\.csv: no such field; it"),
        (Table(second="b"), write(tmp_path / "x.txt", "a"), r"corpus\.unlabelled=.*x\.txt: .* and b are wanted"),
        (Table(), tmp_path / "nowhere", r"corpus\.unlabelled=.*nowhere: no such file or folder"),
        (Squad(), write(tmp_path / "x.json", "{"), r"corpus\.unlabelled=.*x\.json: not JSON"),
        (Squad(), write(tmp_path / "y.json", '{"data": []}'), r"corpus\.unlabelled: y\.json has not one question"),
    ):
        with pytest.raises(SettingError, match=f"^{line}") as error:
            split.read_unlabelled(str(path), SETTING)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("task", "lines", "texts"),
    [
        ("sst2", ["index\tsentence", "0\ta cat"], [("a cat",)]),
        ("sst2", ["sentence\tlabel", "a cat\t1"], [("a cat",)]),
        ("cola", ["index\tsentence", "0\ta cat"], [("a cat",)]),  # the test set has a header
        ("cola", ["gj04\t1\t\ta cat", "gj04\t0\t*\ta dog"], [("a cat",), ("a dog",)]),  # the training set has none
        ("mrpc", ["index\t#1 ID\t#2 ID\t#1 String\t#2 String", "0\t1\t2\ta\tb"], [("a", "b")]),
        ("stsb", ["index\tsentence1\tsentence2", '0\t"a\tb'], [('"a', "b")]),
    ],
)
def test_test_sets_and_training_sets_of_glue(
    tmp_path: Path, task: str, lines: list[str], texts: list[tuple[str, ...]]
) -> None:
    assert texts_of(Glue(task=task), write(tmp_path / "test.tsv", *lines)).texts == texts


def test_glue_takes_columns_as_on_the_hub_and_plain_lines(tmp_path: Path) -> None:
    assert texts_of(Glue(task="sst2"), write(tmp_path / "a.jsonl", '{"sentence": "a", "label": -1}')).first == ["a"]
    assert texts_of(Glue(task="cola"), write(tmp_path / "a.txt", "a\tb", "c")).first == ["a\tb", "c"]


def test_questions_need_a_context_alone(tmp_path: Path) -> None:
    known = sample.made(20)
    flat = [{"context": each.context, "question": each.question} for each in known.questions]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(flat), tmp_path / "c.parquet")
    wrong = [each | {"id": "1", "answers": {"text": ["nowhere"], "answer_start": [7]}} for each in flat]
    for path in (
        sample.write(tmp_path / "train-v2.0.json", sample.official(known)),
        sample.write(tmp_path / "b.jsonl", flat),
        sample.write(tmp_path / "wrong.jsonl", wrong),
        tmp_path / "c.parquet",
    ):
        found = Squad(version="1.1").read_unlabelled(str(path), SETTING)
        assert found.texts == known.texts and not any(each.answers for each in found.questions)
    found = Squad().read_unlabelled(sample.write(tmp_path / "d.jsonl", [*flat, flat[0] | {"question": None}]), SETTING)
    assert found.describe() == "20 questions of d.jsonl (v1.1); 1 left out, which cannot be used"


@pytest.mark.parametrize("values", [True, False])
def test_rows_of_texts_without_labels_follow_those_with(values: bool) -> None:
    tokenizer = vocabulary_of("bert")
    one, other = made(8, values=values), made(5, longest=20)
    bare = LabelledTexts("bare", other.first, other.second, np.empty(0), ())
    labelled, further = (class_sequences(each, tokenizer, 48, "x") for each in (one, bare))
    joined = labelled.with_unlabelled(further)
    assert len(joined) == 13 and joined.cut == labelled.cut + further.cut
    assert np.array_equal(joined.sequences, np.concatenate([labelled.sequences, further.sequences]))
    assert np.array_equal(joined.segments, np.concatenate([labelled.segments, further.segments]))
    assert np.array_equal(joined.labels, one.labels)
    numbers = np.array([9, 3, 12, 0])
    batch = Classes(joined).collate(joined.sequences[numbers].astype(np.int64), numbers.astype(np.uint64), numbers)
    positions, targets = batch.labels["class"]
    assert positions.tolist() == [1, 3] and np.allclose(targets, one.labels[[3, 0]]) and len(batch.ids) == 4
    fewer = replace(bare, first=bare.first[:4], second=(bare.second or [])[:4])
    again = labelled.with_unlabelled(class_sequences(fewer, tokenizer, 48, "x"))
    assert len({labelled.digest, further.digest, joined.digest, again.digest}) == 4


def windows(questions: Questions) -> SpanWindows:
    return span_windows(questions, vocabulary_of("bert"), SpanConfig(48, 7, 6), "x", scoring=False)


def test_windows_of_questions_without_answers_follow_those_with() -> None:
    labelled, further = windows(sample.made(6)), windows(sample.made(4, seed=1))
    joined = labelled.with_unlabelled(further)
    assert np.array_equal(joined.sequences, np.concatenate([labelled.sequences, further.sequences]))
    assert np.array_equal(joined.segments, np.concatenate([labelled.segments, further.segments]))
    assert sorted({*joined.questions.tolist()}) == list(range(10)) and (np.diff(joined.questions) >= 0).all()
    assert len(joined.starts) == len(joined.ends) == len(labelled) and len({labelled.digest, joined.digest}) == 2
    numbers = np.array([len(labelled), 2, len(joined) - 1, len(labelled) - 1])
    batch = Spans(joined).collate(joined.sequences[numbers].astype(np.int64), numbers.astype(np.uint64), numbers)
    for name, known in (("span_start", labelled.starts), ("span_end", labelled.ends)):
        assert batch.labels[name].positions.tolist() == [1, 3]
        assert batch.labels[name].targets.tolist() == known[[2, -1]].tolist()
