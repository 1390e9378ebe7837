"""ONNX files compute what the student computes; the table beside them says what each format costs and keeps."""

import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from families import CAUSAL, FAMILIES, make_family, tokenizer_of
from prediction_models import save_fine_tuned
from tiny import CLS, MASK, PAD, SEP, UNK, VOCAB, WORDS
from transformers import AutoModelForQuestionAnswering, AutoModelForSequenceClassification, AutoTokenizer

from distill.commands import export as command
from distill.commands.cli import main
from distill.commands.export import ExportArguments, inputs_and_targets
from distill.models.export_folder import export
from distill.models.kind import CAUSAL as CAUSAL_KIND
from distill.models.kind import MASKED
from distill.runtime.errors import SettingError

LENGTH = 24


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "words.txt"
    path.write_text(" ".join(np.random.default_rng(0).choice(WORDS, 2000)), encoding="utf-8")
    return path


def saved(root: Path, family: str) -> Path:
    """A run folder with a student in it."""
    root.mkdir()
    export(make_family(family), tokenizer_of(family), root / "student", "# The card\n")
    return root


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose student is a DistilBERT, with its ONNX files; no test may change it."""
    return saved(tmp_path_factory.mktemp("runs") / "run", "distilbert")


@pytest.fixture(scope="module")
def report(run: Path, text: Path) -> dict[str, Any]:
    return command.export(ExportArguments(model=str(run), input=text, max_sequences=12))[1]


@pytest.mark.parametrize(
    "family", ["bert", *(pytest.param(f, marks=pytest.mark.slow) for f in FAMILIES if f != "bert")]
)
def test_a_family_computes_the_same_in_onnx(tmp_path: Path, family: str) -> None:
    """fp32 to rounding, at lengths other than the example's, beyond the windows of attention; int8 about the same."""
    model = make_family(family)
    command.to_onnx(model, tmp_path / "model.onnx")
    exported = command.session(tmp_path / "model.onnx")
    assert command.largest_difference(model, exported) < 1e-4
    command.quantise(tmp_path / "model.onnx", tmp_path / "int8.onnx")
    ids, mask = command.padded_inputs(model, batch_size=3, length=19)
    valid = mask.astype(bool)
    with torch.no_grad():  # what a user calls
        own = model(input_ids=torch.from_numpy(ids), attention_mask=torch.from_numpy(mask)).logits.numpy()[valid]
    np.testing.assert_allclose(exported(ids, mask)[valid], own, atol=1e-4)
    rough = command.session(tmp_path / "int8.onnx")(ids, mask)[valid]
    assert 1e-6 < np.sqrt(np.mean((rough - own) ** 2)) / own.std() < 0.15
    assert {file.name for file in tmp_path.iterdir()} == {"model.onnx", "int8.onnx"}


def test_the_folder_and_its_report(run: Path, report: dict[str, Any]) -> None:
    folder = run / "student" / "onnx"
    beside = {"config.json", "tokenizer.json", "tokenizer_config.json"}
    assert {file.name for file in folder.iterdir()} == {"model.onnx", "model_int8.onnx", "report.json", *beside}
    assert all((folder / name).read_bytes() == (run / "student" / name).read_bytes() for name in beside)
    assert json.loads((folder / "report.json").read_text()) == report
    formats = report["formats"]
    assert list(formats) == ["torch fp32", "ONNX fp32", "ONNX int8"]
    assert formats["ONNX fp32"]["megabytes"] == (folder / "model.onnx").stat().st_size / 1e6
    assert all(found["milliseconds"] > 0 for found in formats.values())
    plain, same, rough = (found["perplexity"] for found in formats.values())
    assert same == pytest.approx(plain, rel=1e-5) and rough == pytest.approx(plain, rel=0.2) and rough != same
    assert report["sequence_length"] == 64  # all that the model takes
    shown = command.table(folder, report)
    assert f"{plain:,.2f}" in shown and f"{report['scored_positions']} positions of words.txt" in shown


@pytest.mark.parametrize("kind", ["class", "answer", pytest.param("value", marks=pytest.mark.slow)])
def test_a_fine_tuned_model_in_onnx(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], text: Path) -> None:
    """The file and the tokenizer beside it are all that is needed; it separates both texts of a pair."""
    import onnxruntime

    auto_class = AutoModelForQuestionAnswering if kind == "answer" else AutoModelForSequenceClassification
    labels = {"class": {"num_labels": 3}, "value": {"num_labels": 1}, "answer": {}}[kind]
    folder = save_fine_tuned(tmp_path / "model", auto_class, **labels)
    assert "which has no perplexity; leave it out" in refused(capsys, f"model={folder}", f"input={text}")
    assert not (folder / "onnx").exists()
    assert main(["export", f"model={folder}"]) == 0
    assert "Perplexity: not computed" in capsys.readouterr().out
    names = ["start_logits", "end_logits"] if kind == "answer" else ["logits"]
    tokenizer = AutoTokenizer.from_pretrained(folder / "onnx")
    model = auto_class.from_pretrained(folder).eval()
    session = onnxruntime.InferenceSession(str(folder / "onnx" / "model.onnx"), providers=["CPUExecutionProvider"])
    assert [output.name for output in session.get_outputs()] == names
    assert [given.name for given in session.get_inputs()] == list(command.INPUTS)
    inputs = tokenizer(["the cat", "of"], ["an owl and the", "the"], padding=True, return_tensors="pt")
    assert (inputs["token_type_ids"] == 1).any() and (inputs["attention_mask"] == 0).any()
    with torch.no_grad():
        expected = model(**inputs)
    arrays = {name: value.numpy() for name, value in inputs.items()}
    valid = arrays["attention_mask"].astype(bool) if kind == "answer" else slice(None)
    for name, output in zip(names, session.run(None, arrays), strict=True):
        np.testing.assert_allclose(output[valid], expected[name].numpy()[valid], atol=1e-4)
    swapped = session.run(None, arrays | {"token_type_ids": 1 - arrays["token_type_ids"]})
    assert np.abs(swapped[0] - expected[names[0]].numpy())[valid].max() > 1e-3


def test_the_matrix_that_embedding_and_head_share_is_quantised_for_both(run: Path, report: dict[str, Any]) -> None:
    import onnx

    graph = onnx.load(run / "student" / "onnx" / "model_int8.onnx").graph
    products = [node for node in graph.node if node.op_type == "MatMulInteger"]
    names = {tensor.name for tensor in graph.initializer}
    eight = (onnx.TensorProto.INT8, onnx.TensorProto.UINT8)
    shapes = {tuple(tensor.dims) for tensor in graph.initializer if tensor.data_type in eight}
    assert len(products) == 2 * 6 + 2 and all(node.input[1] in names for node in products)
    assert {(VOCAB, 32), (32, VOCAB)} <= shapes


def test_perplexity_is_that_of_the_targets() -> None:
    rng = np.random.default_rng(0)
    table = rng.normal(size=(VOCAB, VOCAB)).astype(np.float32)
    inputs, targets = rng.integers(0, VOCAB, (7, LENGTH)), rng.integers(0, VOCAB, (7, LENGTH))
    targets[rng.random(targets.shape) < 0.8] = -100
    log_probs = table - np.log(np.exp(table.astype(np.float64)).sum(1, keepdims=True))
    losses = [-log_probs[a, b] for a, b in zip(inputs.flat, targets.flat, strict=True) if b >= 0]
    found = command.perplexity(lambda ids, mask: table[ids], inputs, targets)
    assert found == pytest.approx(math.exp(np.mean(losses)), rel=1e-9)


def test_what_a_model_is_asked_for(text: Path) -> None:
    """A causal one for every next token of sequences from the whole text, a masked one for 15 % of the tokens."""
    causal: Any = SimpleNamespace(tokenizer=tokenizer_of("bert"), kind=CAUSAL_KIND)
    every, targets = inputs_and_targets(causal, text, LENGTH, 10**6)
    assert every.shape == (2000 // (LENGTH - 2), LENGTH) and (every[:, 0] == CLS).all() and (every[:, -1] == SEP).all()
    assert (targets[:, :-1] == every[:, 1:]).all() and (targets[:, -1] < 0).all()
    few, _ = inputs_and_targets(causal, text, LENGTH, 3)
    assert (few == every[[0, 44, 89]]).all()
    masked: Any = SimpleNamespace(tokenizer=tokenizer_of("bert"), kind=MASKED)
    inputs, targets = inputs_and_targets(masked, text, LENGTH, 3)
    asked = targets >= 0
    assert (asked.sum(1) == round(0.15 * (LENGTH - 2))).all() and (targets[asked] == few[asked]).all()
    assert (inputs[~asked] == few[~asked]).all() and (inputs == MASK).any()
    assert not np.isin(targets[asked], [PAD, UNK, CLS, SEP, MASK]).any()


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line with which the command refuses."""
    capsys.readouterr()
    assert main(["export", *arguments]) == 2
    line = capsys.readouterr().err.strip()
    assert "\n" not in line and line.startswith("distill: ")
    return line


def test_what_is_refused(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = {
        "short": (b"the of and", "fewer than 64 tokens"),
        "utf16": (b"\xff\xfe\xfa" * 99, ": UTF-16: convert"),
        "latin": (b"the\n\xfa\n", ": line 2: not UTF-8 near byte 4"),
        "other": ("\u6cb3 ".encode() * 200, "has not one of its words; give a text"),
    }
    for name, (content, line) in texts.items():
        (tmp_path / name).write_bytes(content)
        shown = refused(capsys, f"model={run}", f"input={tmp_path / name}")
        assert f"input={tmp_path / name}" in shown and line in shown
    assert "no such file" in refused(capsys, f"model={run}", f"input={tmp_path / 'none.txt'}")
    assert "config.json is missing" in refused(capsys, f"model={tmp_path}")
    assert "max_sequences=0" in refused(capsys, f"model={run}", "max_sequences=0")
    assert "`distill export` takes NAME=VALUE" in refused(capsys, f"model={run}", "--text", "a.txt")
    assert "choose one of onnx" in refused(capsys, f"model={run}", "format=tflite")
    broken = saved(tmp_path / "broken", "distilbert") / "student" / "model.safetensors"
    broken.write_bytes(broken.read_bytes()[:999])
    assert "does not load" in refused(capsys, f"model={tmp_path / 'broken'}")
    assert not (tmp_path / "broken" / "student" / "onnx").exists()


def test_a_missing_package_is_named(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    assert "onnxruntime" in (line := refused(capsys, f"model={run}")) and "pip install 'distill-kd[onnx]'" in line


def test_a_file_that_computes_something_else_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_family("bert")
    own = command.in_torch(model)
    assert command.largest_difference(model, own) == 0
    with pytest.raises(SettingError, match="differ from the model's by"):
        command.largest_difference(model, lambda ids, mask: own(ids, np.ones_like(mask)))
    with pytest.raises(SettingError, match=r"by 0\.01, and 0\.0001 of the largest \(\S+\) is allowed"):
        command.largest_difference(model, lambda ids, mask: own(ids, mask) + np.float32(1e-2))
    with pytest.raises(SettingError, match="differ from the model's by nan"):
        command.largest_difference(model, lambda ids, mask: own(ids, mask) * np.float32(np.nan))
    monkeypatch.setattr(command, "MAX_BYTES", 1000)
    with pytest.raises(SettingError, match="over 1,000"):
        command.to_onnx(model, tmp_path / "model.onnx")


@pytest.mark.slow
@pytest.mark.parametrize("family", CAUSAL)
def test_the_command_serves_causal_students(tmp_path: Path, text: Path, family: str) -> None:
    root = saved(tmp_path / "run", family)
    _, found = command.export(ExportArguments(model=str(root), input=text, max_sequences=8))
    plain, same, _ = (found["perplexity"] for found in found["formats"].values())
    assert same == pytest.approx(plain, rel=1e-5)
