"""A student's folder is loaded again before it is published: another model than the student is never given out."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from families import CAUSAL, MASKED, make_family, tokenizer_of
from job import ROOT, Shelf, command, results, weights
from own_models import adapted
from transformers import AutoModelForMaskedLM, BertForMaskedLM, dynamic_module_utils

from distill.models.export_folder import export
from distill.runtime.errors import SettingError


def test_a_student_that_its_class_does_not_give_back_is_not_published(tmp_path: Path) -> None:
    with pytest.raises(SettingError) as error:
        export(adapted(make_family("bert")), tokenizer_of("bert"), tmp_path / "student", "")
    message = str(error.value)
    assert "(weights missing: bert.encoder.layer.0.attention.self.query.bias" in message
    assert "; unexpected: bert.encoder.layer.0.attention.self.query.base_layer.bias" in message
    assert "\n" not in message and not (tmp_path / "student").exists()


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("own_models.adapted", "what loads from its folder is another model (weights missing: bert."),
        ("own_models.without_a_word", "its folder does not load (TypeError: "),
        ("own_models.unsaved", "TypeError: this one is not to be saved (own_models.py, line "),
    ],
)
def test_a_run_of_it_ends_before_it_trains(target: str, words: str, shelf: Shelf, tmp_path: Path) -> None:
    small = ["train.epochs=null", "train.steps=1", "corpus.max_sequences=60", "precision=fp32"]
    models = ["teacher=pretrained", f"teacher.path={shelf.teacher}", "student=custom"]
    models += [f"student._target_={target}"]
    process = command(
        "+recipe=distilbert_gutenberg", *shelf.corpus, *small, *models, f"hydra.run.dir={tmp_path / 'run'}",
        path=ROOT / "tests",
    )  # fmt: skip
    _, errors = process.communicate(timeout=500)
    assert process.returncode == 2 and "Traceback" not in errors
    line = errors.strip().splitlines()[-1]
    assert line.startswith(f"distill: student._target_={target}: The student cannot be exported: ") and words in line
    assert not (tmp_path / "run").exists(), "before its folder is made"


def test_other_values_or_another_forward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    student = make_family("bert")
    monkeypatch.setattr(student.config, "layer_norm_eps", 0.5)  # which its forward does not have
    with pytest.raises(SettingError, match="the same weights and other logits"):
        export(student, tokenizer_of("bert"), tmp_path / "student", "")
    monkeypatch.setattr("distill.models.export_folder.PreTrainedModel.save_pretrained", _saved_wrongly)
    with pytest.raises(SettingError, match=r"different: bert\.embeddings.LayerNorm\.bias"):
        export(make_family("bert"), tokenizer_of("bert"), tmp_path / "student", "")


SAVE = BertForMaskedLM.save_pretrained


def _saved_wrongly(model: Any, folder: Path, state_dict: dict[str, torch.Tensor], **more: Any) -> None:
    name = "bert.embeddings.LayerNorm.bias"
    SAVE(model, folder, state_dict=state_dict | {name: state_dict[name] + 1}, **more)


@pytest.mark.parametrize("family", [*MASKED, *CAUSAL])
def test_every_family_is_given_back(family: str, tmp_path: Path) -> None:
    export(make_family(family), tokenizer_of(family), tmp_path / "student", "")
    name = "AutoModelForMaskedLM" if family in MASKED else "AutoModelForCausalLM"
    export(make_family(family), tokenizer_of(family), tmp_path / "student", "", auto_class=name)


def test_a_student_learns_by_adapters_alone(shelf: Shelf, tmp_path: Path) -> None:
    """Its other weights stay those of its teacher, and its folder loads as any other."""
    pytest.importorskip("peft")
    models = ["student=custom", "student._target_=own_models.with_adapters", "student.layers=null"]
    small = ["train.epochs=null", "train.steps=2", "train.accumulate=1", "objective=mlm", "optimizer.lr=1e-2"]
    assert shelf.run(tmp_path / "run", *models, *small) == 0
    before, after = weights(shelf.teacher), weights(tmp_path / "run")
    of_student = results(tmp_path / "run")["student"]
    tied = after["cls.predictions.decoder.weight"] if "cls.predictions.decoder.weight" in after else torch.empty(0)
    assert of_student["parameters"] == sum(tensor.numel() for tensor in after.values()) - tied.numel()
    assert of_student["bytes"] == 4 * of_student["parameters"]
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert before.keys() == after.keys()
    assert changed == {f"bert.encoder.layer.{number}.attention.self.query.weight" for number in range(4)}


def test_an_adapter_of_tied_embeddings_unties_them(tmp_path: Path) -> None:
    """The head stays as it is: a run would else train for hours, and then have a student that nothing gives back."""
    peft = pytest.importorskip("peft")
    student = make_family("bert")
    assert student.get_output_embeddings().weight is student.get_input_embeddings().weight
    peft.inject_adapter_in_model(peft.LoraConfig(r=2, target_modules=["word_embeddings"]), student)
    for name, weight in student.named_parameters():
        if "lora" in name:
            torch.nn.init.normal_(weight)
    export(student, tokenizer_of("bert"), tmp_path / "student")  # which compares the logits
    assert json.loads((tmp_path / "student" / "config.json").read_text())["tie_word_embeddings"] is False


CONFIGURATION = """
from transformers import BertConfig

class OwnConfig(BertConfig):
    model_type = "own_bert"
"""
MODELING = """
from transformers import BertForMaskedLM

from .configuration_own import OwnConfig

class OwnForMaskedLM(BertForMaskedLM):
    config_class = OwnConfig
"""


def test_a_student_whose_code_comes_with_it_is_exported(
    shelf: Shelf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a model of the Hub that transformers lacks; the folder brings the code, and the card says so."""
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    model = tmp_path / "own"
    shutil.copytree(shelf.teacher / "student", model)
    (model / "configuration_own.py").write_text(CONFIGURATION)
    (model / "modeling_own.py").write_text(MODELING)
    fields = json.loads((model / "config.json").read_text())
    names = {"AutoConfig": "configuration_own.OwnConfig", "AutoModelForMaskedLM": "modeling_own.OwnForMaskedLM"}
    fields |= {"model_type": "own_bert", "auto_map": names, "architectures": ["OwnForMaskedLM"]}
    (model / "config.json").write_text(json.dumps(fields))
    pair = ["student=pretrained", f"student.path={model}", "student.trust_remote_code=true", "student.layers=null"]
    assert shelf.run(tmp_path / "run", *pair, "objective.cosine.weight=0", "train.epochs=null", "train.steps=1") == 0
    student = tmp_path / "run" / "student"
    assert (student / "modeling_own.py").exists()
    assert "from_pretrained(folder, trust_remote_code=True)" in (student / "README.md").read_text()
    assert type(AutoModelForMaskedLM.from_pretrained(student, trust_remote_code=True)).__name__ == "OwnForMaskedLM"
