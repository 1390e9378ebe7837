"""The command: inputs from the command line, files and pipes, outcomes as files, and refusals."""

import gzip
import io
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
import yaml
from job import Shelf
from prediction_models import save_fine_tuned
from transformers import AutoModelForQuestionAnswering, AutoModelForSequenceClassification

from distill.commands.cli import main as distill_command
from distill.commands.prediction import predict


def main(arguments: list[str]) -> int:
    """`distill predict` in this process; gives the exit status."""
    return distill_command(["predict", *arguments])


@pytest.fixture(scope="module")
def sentiment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder, as far as predictions look at it, of a model for classes."""
    folder = tmp_path_factory.mktemp("sst2")
    save_fine_tuned(folder / "student", AutoModelForSequenceClassification, id2label={0: "positive", 1: "negative"})
    settings = {"corpus": {"kind": "glue", "task": "sst2", "sequence_length": 16, "text": None, "second": None}}
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    (folder / "metrics.jsonl").write_text("")
    return folder


def lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line with which a command is refused."""
    assert main(list(arguments)) == 2
    output = capsys.readouterr()
    assert output.out == "" and output.err.startswith("distill: ") and output.err.count("\n") == 1, output
    return output.err.removeprefix("distill: ").strip()


def test_texts_on_the_command_line(shelf: Shelf, capsys: pytest.CaptureFixture[str]) -> None:
    texts = ["The old [MASK].", "A [MASK] = letter."]
    assert main([f"model={shelf.teacher}", *(f"text={text}" for text in texts), "top_k=2"]) == 0
    assert lines(capsys.readouterr().out) == predict(shelf.teacher, texts, top_k=2)


def test_files_and_pipes(sentiment: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    texts = ["the cat", '"NA," of the owl', "of the"]
    expected = predict(sentiment, texts)
    objects = "".join(json.dumps({"id": n, "text": text}) + "\n\n" for n, text in enumerate(texts))
    (tmp_path / "in.txt").write_text("\n\n".join(texts))
    (tmp_path / "in.jsonl").write_text(objects)
    (tmp_path / "packed.jsonl.gz").write_bytes(gzip.compress(objects.encode()))
    rows = [{"id": n, "text": text} for n, text in enumerate(texts)]
    pd.DataFrame(rows).to_csv(tmp_path / "in.csv", index=False)
    pd.DataFrame(rows).to_parquet(tmp_path / "in.parquet")
    (tmp_path / "in.tsv").write_text("".join(f"{n}\t{text}\n" for n, text in [("id", "text"), *enumerate(texts)]))
    for name in ("in.txt", "in.jsonl", "packed.jsonl.gz", "in.csv", "in.tsv", "in.parquet"):
        given = [f"model={sentiment}", f"input={tmp_path / name}", f"output={tmp_path / 'out.jsonl'}"]
        assert main([*given, "overwrite=true"]) == 0
        found = lines((tmp_path / "out.jsonl").read_text())
        assert [(one["text"], one["class"]) for one in found] == [(one["text"], one["class"]) for one in expected]
        assert name == "in.txt" or [int(one["id"]) for one in found] == [0, 1, 2]
    assert "3 predictions in" in capsys.readouterr().err
    for piped in ("\n".join(['"NA," of the owl', *texts]), '{"text": "of"}\n' + objects):
        monkeypatch.setattr(sys, "stdin", io.StringIO(piped))
        assert main([f"model={sentiment}"]) == 0
        assert [one["text"] for one in lines(capsys.readouterr().out)][1:] == texts


@pytest.mark.parametrize("suffix", ["csv", "tsv", "parquet"])
def test_predictions_as_a_table(suffix: str, sentiment: Path, tmp_path: Path) -> None:
    """As others read it, and as an input again; numbers are numbers in Parquet, and no row lacks a column."""
    records: list[Any] = [
        {"id": 1, "text": 'an "owl",\tor\ntwo', "sure": True},
        {"id": 2, "text": "the cat", "more": [1, {"a": None}]},
        {"id": 2**70, "text": "of é", "sure": None, "late": 0.5},
    ]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    output = tmp_path / f"OUT.{suffix.upper()}"
    model = save_fine_tuned(tmp_path / "m", AutoModelForSequenceClassification)
    given = [f"model={model}", f"input={tmp_path / 'in.jsonl'}", f"output={output}"]
    assert main(given) == 0
    expected = predict(model, records)
    table = (
        pd.read_parquet(output) if suffix == "parquet" else pd.read_csv(output, sep="\t" if suffix == "tsv" else ",")
    )
    assert list(table) == ["id", "text", "sure", "class", "probability", "probabilities", "more", "late"]
    assert list(table["text"]) == [record["text"] for record in records]
    assert list(map(str, table["id"])) == ["1", "2", str(2**70)]
    assert list(table["class"]) == [each["class"] for each in expected]
    np.testing.assert_allclose(table["probability"], [each["probability"] for each in expected])
    assert [json.loads(text) for text in table["probabilities"]] == [each["probabilities"] for each in expected]
    assert json.loads(table["more"][1]) == [1, {"a": None}] and table["late"][2] == 0.5
    if suffix == "parquet":
        assert list(table["sure"]) == [True, None, None] and list(map(str, pq.read_schema(output).types))[2] == "bool"
    if suffix == "tsv":  # which is read without quotation marks
        return
    assert main([f"model={model}", f"input={output}", f"output={tmp_path / 'again.jsonl'}"]) == 0
    again = lines((tmp_path / "again.jsonl").read_text())
    assert [(each["text"], each["class"], each["input_class"]) for each in again] == [
        (each["text"], each["class"], each["class"]) for each in expected
    ]


def test_columns_are_called_as_in_training(sentiment: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = shutil.copytree(sentiment, tmp_path / "run")
    settings = {"corpus": {"kind": "table", "text": "review", "second": "reply", "sequence_length": 16}}
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    (tmp_path / "in.csv").write_text("text,review,reply\nof the,the cat,an owl\n")
    assert main([f"model={folder}", f"input={tmp_path / 'in.csv'}"]) == 0
    (found,) = lines(capsys.readouterr().out)
    assert found["probability"] == pytest.approx(predict(sentiment, ("the cat", "an owl"))["probability"])
    assert (found["text"], found["review"], found["reply"]) == ("of the", "the cat", "an owl") and "second" not in found


def test_answers_in_squads_form(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = save_fine_tuned(tmp_path / "model", AutoModelForQuestionAnswering)
    questions = [{"id": f"q{n}", "question": text, "answers": []} for n, text in enumerate(("what", "who is it"))]
    content = {"data": [{"paragraphs": [{"context": "the cat and an owl", "qas": questions}]}]}
    (tmp_path / "dev.json").write_text(json.dumps(content))
    assert main([f"model={model}", f"input={tmp_path / 'dev.json'}", f"output={tmp_path / 'answers.json'}"]) == 0
    found = json.loads((tmp_path / "answers.json").read_text())
    records = [{"question": each["question"], "context": "the cat and an owl"} for each in questions]
    assert found == {f"q{n}": each["answer"] for n, each in enumerate(predict(model, records))}
    assert main([f"model={model}", "question=what", "context=the cat"]) == 0
    assert lines(capsys.readouterr().out.splitlines()[-1])[0]["answer"]


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["text=a"], "model: missing"),
        (["model=m", "--fast"], "--fast is not an argument of `distill predict`"),
        (["model=m", "topk=5"], "topk is not an argument of `distill predict` (did you mean top_k"),
        (["model=m", "top_k=many"], "top_k=many: should be a valid integer"),
        (["model=m", "sample=maybe"], "sample=maybe: should be a valid boolean"),
        (["model=m", "text=a", "input=b"], "input and text are both set"),
        (["model=m", "question=a"], "question= and context= belong together"),
        (["model=no/such/model", "text=a"], "model=no/such/model does not load"),
        (["model=m", "text=a", "output=x.xlsx"], "output=x.xlsx: no file that can be written; give FILE.jsonl"),
        (["model=m", "text=a", "output=no/such/x.csv"], "output=no/such/x.csv: no file that can be written"),
    ],
)
def test_bad_command_lines(arguments: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert refused(capsys, *arguments).startswith(line)


@pytest.mark.parametrize(
    ("name", "content", "line"),
    [
        ("in.jsonl", b'{"text": "the cat"}\n\n{"text"\n', "in.jsonl, line 3 cannot be read (JSONDecodeError"),
        ("in.jsonl", b'{"text": 3}\n', "in.jsonl, line 1 has no text that is text"),
        ("in.tsv", b"index\tsentence\n0\tthe\tcat\n", "another number of fields than the header"),
        ("in.csv", b"text,id\nthe cat\n", "in.csv, row 1 cannot be read (ValueError: another number of fields"),
        ("in.csv", b"text\nfine\n\xff\xfe\n", "if it is not UTF-8 convert it"),
        ("in.parquet", b"PAR2", "in.parquet, row 1 cannot be read (ArrowInvalid"),
        ("in.json", b'{"version": 1}', "in.json, line 1 cannot be read (KeyError: 'data')"),
        ("in.bin", b"a", "no such file, or none that is read; give *.jsonl"),
    ],
)
def test_bad_inputs(
    name: str, content: bytes, line: str, sentiment: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).write_bytes(content)
    given = [f"model={sentiment}", f"input={tmp_path / name}", f"output={tmp_path / 'out.jsonl'}"]
    assert line in refused(capsys, *given)
    assert not (tmp_path / "out.jsonl").exists()
