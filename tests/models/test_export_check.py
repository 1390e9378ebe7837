"""A student's folder gives the student back, with a head that is tied or of its own; else it is not published."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from families import CAUSAL, FAMILIES, make_family, tokenizer_of
from job import ROOT, Shelf, command, results, weights
from own_models import adapted
from safetensors.torch import load_file, save_file
from tiny import VOCAB
from torch import nn
from transformers import AutoModelForMaskedLM, BertForMaskedLM, dynamic_module_utils

from distill.commands.api.pair import load_pair
from distill.config.settings import StudentConfig
from distill.models import kind
from distill.models.export_folder import _by_sdpa, export
from distill.models.load import load_pretrained
from distill.models.loaded import load_model
from distill.models.student import make_student
from distill.models.weights import word_embeddings
from distill.runtime.errors import SettingError

IDS = torch.arange(5, 17)[None]
AUTO = ("AutoModelForMaskedLM", "AutoModelForCausalLM")


def test_a_student_of_flash_attention_is_compared_by_another_one() -> None:
    """Flash attention takes no fp32, in which the folder's logits are those of the student."""
    chosen = list[str]()
    config = SimpleNamespace(_attn_implementation="flash_attention_2")
    with _by_sdpa(SimpleNamespace(config=config, set_attn_implementation=chosen.append)):
        assert chosen == ["sdpa"]
    assert chosen == ["sdpa", "flash_attention_2"]


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
    models = ["teacher=pretrained", f"teacher.path={shelf.teacher}", "student=custom", f"student._target_={target}"]
    run = ["+recipe=distilbert_gutenberg", *shelf.corpus, *small, *models, f"hydra.run.dir={tmp_path / 'run'}"]
    process = command(*run, path=ROOT / "tests")
    _, errors = process.communicate(timeout=500)
    assert process.returncode == 2 and "Traceback" not in errors
    line = errors.strip().splitlines()[-1]
    assert line.startswith(f"distill: student._target_={target}: The student cannot be exported: ") and words in line
    assert not (tmp_path / "run").exists(), "before its folder is made"


SAVE = BertForMaskedLM.save_pretrained


def _saved_wrongly(model: Any, folder: Path, state_dict: dict[str, torch.Tensor], **more: Any) -> None:
    name = "bert.embeddings.LayerNorm.bias"
    SAVE(model, folder, state_dict=state_dict | {name: state_dict[name] + 1}, **more)


def test_other_values_or_another_forward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    student = make_family("bert")
    monkeypatch.setattr(student.config, "layer_norm_eps", 0.5)  # which its forward does not have
    with pytest.raises(SettingError, match="the same weights and other logits"):
        export(student, tokenizer_of("bert"), tmp_path / "student", "")
    monkeypatch.setattr("distill.models.export_folder.PreTrainedModel.save_pretrained", _saved_wrongly)
    with pytest.raises(SettingError, match=r"different: bert\.embeddings.LayerNorm\.bias"):
        export(make_family("bert"), tokenizer_of("bert"), tmp_path / "student", "")


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
    assert "from_pretrained(folder, trust_remote_code=True)" in (student / "README.md").read_text()
    assert type(AutoModelForMaskedLM.from_pretrained(student, trust_remote_code=True)).__name__ == "OwnForMaskedLM"


# --- adapters


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
    assert of_student["bytes"] == 4 * of_student["parameters"] and before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {f"bert.encoder.layer.{number}.attention.self.query.weight" for number in range(4)}


def test_an_adapter_of_tied_embeddings_unties_them(tmp_path: Path) -> None:
    """The head stays as it is: a run would else train for hours, and then have a student that nothing gives back."""
    peft = pytest.importorskip("peft")
    student = make_family("bert")
    assert student.get_output_embeddings().weight is student.get_input_embeddings().weight
    peft.inject_adapter_in_model(peft.LoraConfig(r=2, target_modules=["word_embeddings"]), student)
    for name, weight in student.named_parameters():
        if "lora" in name:
            nn.init.normal_(weight)
    export(student, tokenizer_of("bert"), tmp_path / "student")  # which compares the logits
    assert not says_tied(tmp_path / "student")


# --- heads that are tied to the embeddings, and those that only their configuration or only their weights tie


def written(model: Any, family: str, folder: Path) -> Path:
    for part in (model, tokenizer_of(family)):
        part.save_pretrained(folder)
    return folder


def says_tied(folder: Path) -> bool:
    return bool(json.loads((folder / "config.json").read_text())["tie_word_embeddings"])


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model.eval()(input_ids=IDS).logits


@pytest.mark.parametrize("family", FAMILIES)
def test_a_head_of_its_own_under_a_configuration_that_ties_it(family: str, tmp_path: Path) -> None:
    of_family = kind.CAUSAL if family in CAUSAL else kind.MASKED
    model = make_family(family, tie_word_embeddings=True)
    folder, names = written(model, family, tmp_path / "teacher"), word_embeddings(model)
    assert names is not None
    tensors = load_file(folder / "model.safetensors")
    torch.manual_seed(9)
    tensors[names[0]] = tensors[names[1]] + 0.3 * torch.randn_like(tensors[names[1]])
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    expected = logits(type(model).from_pretrained(folder))
    teacher, tokenizer = load_pretrained("teacher.path", str(folder), of_family), tokenizer_of(family)
    assert torch.equal(logits(teacher), expected) and not torch.equal(logits(model), expected)
    starts = (StudentConfig(layers=[0, 1], dropout=0.0), StudentConfig(init="pretrained", path=str(folder)))
    for number, settings in enumerate(starts):
        student = make_student(settings, teacher, tokenizer, 12, of_family)
        torch.testing.assert_close(logits(student), expected, rtol=0, atol=1e-5)
        export(
            student, tokenizer, tmp_path / f"student{number}", "", auto_class=AUTO[family in CAUSAL] if number else None
        )
        assert not says_tied(tmp_path / f"student{number}")
        again = type(student).from_pretrained(tmp_path / f"student{number}")
        torch.testing.assert_close(logits(again), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", ["bert", "roberta", "albert", "distilbert", "gpt2", "llama"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_head_that_a_program_has_exchanged(family: str, tied: bool, tmp_path: Path) -> None:
    """Tied by its configuration alone, or by its weights alone."""
    model = make_family(family, tie_word_embeddings=not tied)
    embeddings = model.get_input_embeddings().weight
    model.get_output_embeddings().weight = embeddings if tied else nn.Parameter(torch.randn_like(embeddings))
    expected = logits(model)
    pair = load_pair((model, tokenizer_of(family)), layers=[0, 1])
    assert torch.equal(logits(model), expected)
    torch.testing.assert_close(logits(pair.student.model), expected, rtol=0, atol=1e-5)
    export(pair.student.model, tokenizer_of(family), tmp_path / "student", "")
    assert says_tied(tmp_path / "student") == tied
    torch.testing.assert_close(logits(load_model(tmp_path / "student", "cpu").model), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("saved", [True, False])
def test_no_setting_ties_a_head_of_its_own(saved: bool, tmp_path: Path) -> None:
    folder = written(make_family("llama", tie_word_embeddings=False), "llama", tmp_path / "teacher")
    teacher = load_pretrained("teacher.path", str(folder), kind.CAUSAL)
    settings = StudentConfig(config={"tie_word_embeddings": True})
    settings = settings.changed(init="pretrained", path=str(folder)) if saved else settings
    with pytest.raises(SettingError) as raised:
        make_student(settings, teacher, tokenizer_of("llama"), 12, kind.CAUSAL)
    assert raised.value.setting == "student.config.tie_word_embeddings"


@pytest.mark.parametrize("name", ["lm_head.weight", "lm_head.bias"])
def test_a_head_of_which_file_and_configuration_disagree(name: str, tmp_path: Path) -> None:
    """Its weight is in neither place, or it has a bias that its class does not add."""
    folder = written(make_family("llama", tie_word_embeddings=name.endswith("bias")), "llama", tmp_path / "teacher")
    tensors = load_file(folder / "model.safetensors")
    tensors = {**tensors, name: torch.ones(VOCAB)} if tensors.pop(name, None) is None else tensors
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(SettingError, match=name) as raised:
        load_pretrained("teacher.path", str(folder), kind.CAUSAL)
    assert raised.value.setting == "teacher.path" and raised.value.cure
