"""ONNX files compute what the student computes, and the report beside them says what each format costs."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from families import CAUSAL, FAMILIES, make_family, tokenizer_of
from job import refused_line
from prediction_models import save_fine_tuned
from tiny import VOCAB
from transformers import AutoModelForQuestionAnswering, AutoModelForSequenceClassification, AutoTokenizer

from distill import StudentConfig, load_pair
from distill.commands import export as command
from distill.commands.cli import main
from distill.commands.export import ExportArguments
from distill.models.export_folder import export
from distill.models.loaded import LoadedModel
from distill.runtime.errors import SettingError

OTHERS = [pytest.param(family, marks=pytest.mark.slow) for family in FAMILIES if family != "bert"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: Any) -> Path:
    """A run whose student is a DistilBERT, with its ONNX files; no test may change it."""
    root = tmp_path_factory.mktemp("run")
    export(make_family("distilbert"), tokenizer_of("distilbert"), root / "student", "# The card\n")
    command.export(ExportArguments(model=str(root)))
    return root


@pytest.mark.parametrize("family", ["bert", *OTHERS])
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


def test_the_folder_and_its_report(run: Path, capsys: Any) -> None:
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


KINDS = {
    "class": (AutoModelForSequenceClassification, {"num_labels": 3}, ["logits"]),
    "value": (AutoModelForSequenceClassification, {"num_labels": 1}, ["logits"]),
    "answer": (AutoModelForQuestionAnswering, {}, ["start_logits", "end_logits"]),
}


@pytest.mark.parametrize("kind", ["class", "answer", pytest.param("value", marks=pytest.mark.slow)])
def test_a_fine_tuned_model_in_onnx(kind: str, tmp_path: Path) -> None:
    """The file and the tokenizer beside it are all that is needed; it separates both texts of a pair."""
    import onnxruntime

    auto_class, labels, names = KINDS[kind]
    folder = save_fine_tuned(tmp_path / "model", auto_class, **labels)
    assert main(["export", f"model={folder}"]) == 0
    session = onnxruntime.InferenceSession(folder / "onnx" / "model.onnx")
    assert [output.name for output in session.get_outputs()] == names
    assert [given.name for given in session.get_inputs()] == ["input_ids", "attention_mask", "token_type_ids"]
    model, tokenizer = auto_class.from_pretrained(folder), AutoTokenizer.from_pretrained(folder / "onnx")
    inputs = tokenizer(["the cat", "of"], ["an owl and the", "the"], padding=True, return_tensors="pt")
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


def test_what_does_not_compute_the_same_or_cannot_be_made_is_refused(
    run: Path, tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    model = make_family("bert").eval()
    loaded, own = LoadedModel.of(model, tokenizer_of("bert")), command.in_torch(model)
    assert command.largest_difference(loaded, own) == 0
    others = {
        "by": lambda inputs: own(inputs | {"attention_mask": np.ones_like(inputs["attention_mask"])}),
        r"by 0\.01, more than 0\.0001 of the largest": lambda inputs: [own(inputs)[0] + 0.01],
        "by nan": lambda inputs: [own(inputs)[0] * np.float32(np.nan)],
    }
    for words, other in others.items():
        with pytest.raises(SettingError, match=f"differ from the model's {words}"):
            command.largest_difference(loaded, other)
    monkeypatch.setattr(command, "MAX_BYTES", 1000)
    with pytest.raises(SettingError, match="more than 1,000 bytes"):
        command.to_onnx(loaded, tmp_path / "model.onnx")
    export(model, tokenizer_of("bert"), tmp_path / "student", "# The card\n")
    broken = tmp_path / "student" / "model.safetensors"
    broken.write_bytes(broken.read_bytes()[:999])
    assert "does not load" in refused_line(capsys, "export", f"model={tmp_path}")
    assert not (tmp_path / "student" / "onnx").exists()
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    assert "pip install 'distill-kd[onnx]'" in refused_line(capsys, "export", f"model={run}")


TEXTS = ["the of and to in", "he was not so [MASK] the one, and she said that it was all the longest"]
IDS = [[2, 9, 10, 11, 17, 12, 13, 14, 20, 25, 15, 16, 17, 18, 30, 19, 20, 21, 22, 3]]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_folder_gives_the_student_back(tmp_path: Path, family: str) -> None:
    student, tokenizer = make_family(family), tokenizer_of(family)
    export(student, tokenizer, folder := tmp_path / "student", "# The card\n")
    causal = family in CAUSAL
    kind = transformers.AutoModelForCausalLM if causal else transformers.AutoModelForMaskedLM
    capped = {"attn_implementation": "eager"} if getattr(student.config, "attn_logit_softcapping", None) else {}
    model, loading = kind.from_pretrained(folder, output_loading_info=True, **capped)
    with torch.no_grad():
        logits = [each.eval()(torch.tensor(IDS)).logits for each in (model, student)]
    torch.testing.assert_close(*logits, rtol=0, atol=1e-6)
    assert type(model) is type(student) and not loading["missing_keys"]
    again = transformers.AutoTokenizer.from_pretrained(folder)
    assert again(TEXTS, padding=True).input_ids == tokenizer(TEXTS, padding=True).input_ids
    assert again.model_max_length == 64 and "[MASK]" in again.all_special_tokens
    task = "text-generation" if causal else "fill-mask"
    ask = transformers.pipeline(task, model=str(folder), tokenizer=str(folder), device="cpu", model_kwargs=capped)
    answer = ask(TEXTS[0], max_new_tokens=5, do_sample=False) if causal else ask(TEXTS[1])
    assert answer[0]["generated_text"].startswith(TEXTS[0]) if causal else len(answer) == 5
    assert (folder / "README.md").read_text() == "# The card\n"


def test_a_soft_cap_is_kept() -> None:
    """Which transformers 5.17 has by SDPA: it leaves the cap out."""
    pair = load_pair((make_family("gemma2"), tokenizer_of("gemma2")), StudentConfig(layers=[0]), device="cpu")
    assert pair.student.model.config._attn_implementation == "eager"


def test_segments_are_given_where_the_student_has_them(tmp_path: Path) -> None:
    tokenizer = tokenizer_of("bert")
    tokenizer.model_input_names = ["input_ids", "token_type_ids", "attention_mask"]
    for family, segments in (("bert", {"token_type_ids"}), ("distilbert", set())):
        export(make_family(family), tokenizer, tmp_path / family, "")
        found = transformers.AutoTokenizer.from_pretrained(tmp_path / family)(TEXTS)
        assert found.keys() == {"input_ids", "attention_mask"} | segments
