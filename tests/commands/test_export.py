"""ONNX files compute what the student computes, and the report beside them says what each format costs."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from families import FAMILIES, make_family, tokenizer_of
from prediction_models import save_fine_tuned
from tiny import VOCAB
from transformers import AutoModelForQuestionAnswering, AutoModelForSequenceClassification, AutoTokenizer

from distill.commands import export as command
from distill.commands.cli import main
from distill.commands.export import ExportArguments
from distill.models.export_folder import export
from distill.models.loaded import LoadedModel
from distill.runtime.errors import SettingError


def saved(root: Path, family: str) -> Path:
    """A run folder with a student in it."""
    root.mkdir()
    export(make_family(family), tokenizer_of(family), root / "student", "# The card\n")
    return root


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose student is a DistilBERT, with its ONNX files; no test may change it."""
    root = saved(tmp_path_factory.mktemp("runs") / "run", "distilbert")
    command.export(ExportArguments(model=str(root)))
    return root


@pytest.mark.parametrize(
    "family", ["bert", *(pytest.param(f, marks=pytest.mark.slow) for f in FAMILIES if f != "bert")]
)
def test_a_family_computes_the_same_in_onnx(tmp_path: Path, family: str) -> None:
    """fp32 to rounding, at lengths other than the example's, beyond the windows of attention; int8 about the same."""
    model = make_family(family).eval()
    loaded = LoadedModel.of(model, tokenizer_of(family))
    command.to_onnx(loaded, tmp_path / "model.onnx")
    exported = command.session(tmp_path / "model.onnx")
    assert command.largest_difference(loaded, exported) < 1e-4
    command.quantise(tmp_path / "model.onnx", tmp_path / "int8.onnx")
    inputs = command.padded_inputs(loaded, batch_size=3, length=19)
    valid = inputs["attention_mask"].astype(bool)
    with torch.no_grad():  # what a user calls
        own = model(**{name: torch.from_numpy(value) for name, value in inputs.items()}).logits.numpy()[valid]
    np.testing.assert_allclose(exported(inputs)[0][valid], own, atol=1e-4)
    rough = command.session(tmp_path / "int8.onnx")(inputs)[0][valid]
    assert 1e-6 < np.sqrt(np.mean((rough - own) ** 2)) / own.std() < 0.15
    assert {file.name for file in tmp_path.iterdir()} == {"model.onnx", "int8.onnx"} and list(inputs)[2:] == []


def test_the_folder_and_its_report(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run / "student" / "onnx"
    beside = {"config.json", "tokenizer.json", "tokenizer_config.json"}
    assert {file.name for file in folder.iterdir()} == {"model.onnx", "model_int8.onnx", "report.json", *beside}
    assert all((folder / name).read_bytes() == (run / "student" / name).read_bytes() for name in beside)
    assert main(["export", f"model={run}"]) == 0  # which its own files do not hinder
    shown, report = capsys.readouterr().out.splitlines(), json.loads((folder / "report.json").read_text())
    megabytes = {name: found["megabytes"] for name, found in report["formats"].items()}
    assert list(megabytes) == ["torch fp32", "ONNX fp32", "ONNX int8"] and report["sequence_length"] == 64
    assert megabytes["ONNX fp32"] == (folder / "model.onnx").stat().st_size / 1e6 > megabytes["ONNX int8"]
    assert all(found["milliseconds"] > 0 for found in report["formats"].values())
    assert 0 < report["largest_difference"] < 1e-4 and f"{report['largest_difference']:.1g}" in shown[0]
    assert [line.partition(":")[0] for line in shown[1:]] == list(megabytes)


@pytest.mark.parametrize("kind", ["class", "answer", pytest.param("value", marks=pytest.mark.slow)])
def test_a_fine_tuned_model_in_onnx(kind: str, tmp_path: Path) -> None:
    """The file and the tokenizer beside it are all that is needed; it separates both texts of a pair."""
    import onnxruntime

    auto_class = AutoModelForQuestionAnswering if kind == "answer" else AutoModelForSequenceClassification
    labels = {"class": {"num_labels": 3}, "value": {"num_labels": 1}, "answer": {}}[kind]
    folder = save_fine_tuned(tmp_path / "model", auto_class, **labels)
    assert main(["export", f"model={folder}"]) == 0
    names = ["start_logits", "end_logits"] if kind == "answer" else ["logits"]
    tokenizer = AutoTokenizer.from_pretrained(folder / "onnx")
    model = auto_class.from_pretrained(folder).eval()
    session = onnxruntime.InferenceSession(str(folder / "onnx" / "model.onnx"), providers=["CPUExecutionProvider"])
    assert [output.name for output in session.get_outputs()] == names
    assert [given.name for given in session.get_inputs()] == ["input_ids", "attention_mask", "token_type_ids"]
    inputs = tokenizer(["the cat", "of"], ["an owl and the", "the"], padding=True, return_tensors="pt")
    assert (inputs["token_type_ids"] == 1).any() and (inputs["attention_mask"] == 0).any()
    arrays = {name: inputs[name].numpy() for name in ("input_ids", "attention_mask", "token_type_ids")}
    valid = arrays["attention_mask"].astype(bool) if kind == "answer" else slice(None)
    with torch.no_grad():
        expected = model(**inputs)
    for name, output in zip(names, session.run(None, arrays), strict=True):
        np.testing.assert_allclose(output[valid], expected[name].numpy()[valid], atol=1e-4)
    swapped = session.run(None, arrays | {"token_type_ids": 1 - arrays["token_type_ids"]})
    assert np.abs(swapped[0] - expected[names[0]].numpy())[valid].max() > 1e-3


def test_the_matrix_that_embedding_and_head_share_is_quantised_for_both(run: Path) -> None:
    import onnx

    graph = onnx.load(run / "student" / "onnx" / "model_int8.onnx").graph
    products = [node for node in graph.node if node.op_type == "MatMulInteger"]
    names = {tensor.name for tensor in graph.initializer}
    eight = (onnx.TensorProto.INT8, onnx.TensorProto.UINT8)
    shapes = {tuple(tensor.dims) for tensor in graph.initializer if tensor.data_type in eight}
    assert len(products) == 2 * 6 + 2 and all(node.input[1] in names for node in products)
    assert {(VOCAB, 32), (32, VOCAB)} <= shapes


def test_what_is_refused(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*arguments: str) -> str:
        capsys.readouterr()
        assert main(["export", *arguments]) == 2
        line = capsys.readouterr().err.strip()
        assert "\n" not in line and line.startswith("distill: ")
        return line

    assert "config.json is missing" in refused(f"model={tmp_path}")
    assert "`distill export` takes NAME=VALUE" in refused(f"model={run}", "--text", "a.txt")
    assert "format=tflite: should be 'onnx'" in refused(f"model={run}", "format=tflite")
    broken = saved(tmp_path / "broken", "distilbert") / "student" / "model.safetensors"
    broken.write_bytes(broken.read_bytes()[:999])
    assert "does not load" in refused(f"model={tmp_path / 'broken'}")
    assert not (tmp_path / "broken" / "student" / "onnx").exists()
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    assert "onnxruntime" in (line := refused(f"model={run}")) and "pip install 'distill-kd[onnx]'" in line


def test_a_file_that_computes_something_else_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_family("bert").eval()
    loaded, own = LoadedModel.of(model, tokenizer_of("bert")), command.in_torch(model)
    assert command.largest_difference(loaded, own) == 0

    def without_mask(inputs: Any) -> Any:
        return own(inputs | {"attention_mask": np.ones_like(inputs["attention_mask"])})

    others = {"by": without_mask, r"by 0\.01, more than 0\.0001 of the largest": lambda inputs: [own(inputs)[0] + 0.01]}
    others["by nan"] = lambda inputs: [own(inputs)[0] * np.float32(np.nan)]
    for words, other in others.items():
        with pytest.raises(SettingError, match=f"differ from the model's {words}"):
            command.largest_difference(loaded, other)
    monkeypatch.setattr(command, "MAX_BYTES", 1000)
    with pytest.raises(SettingError, match="more than 1,000 bytes"):
        command.to_onnx(loaded, tmp_path / "model.onnx")
