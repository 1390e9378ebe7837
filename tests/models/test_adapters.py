"""A folder of PEFT's adapters is the model that they make of their base."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from families import make_family, tokenizer_of
from torch import nn
from transformers import AutoModelForSequenceClassification

from distill.config.settings import StudentConfig, TeacherConfig
from distill.models.kind import CAUSAL
from distill.models.loaded import load_model
from distill.models.student import make_student
from distill.models.teacher import load_teacher
from distill.runtime.errors import SettingError

peft = pytest.importorskip("peft")
IDS = torch.arange(5, 17)[None]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model.eval()(input_ids=IDS).logits


def adapters(folder: Path, family: str = "llama", base: str | None = None, **settings: Any) -> Any:
    """Write base and adapters; gives the model that has both."""
    model = make_family(family)
    model.save_pretrained(folder / "base")
    tokenizer_of(family).save_pretrained(folder / "base")
    if settings.get("task_type") == "SEQ_CLS":
        model = AutoModelForSequenceClassification.from_pretrained(folder / "base", num_labels=3)
        model.base_model.save_pretrained(folder / "base")  # with its pooler
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "c_attn", "query"], **settings)
    adapted = peft.get_peft_model(model, config)
    for name, weight in adapted.named_parameters():
        if "lora" in name:
            nn.init.normal_(weight, std=0.3)
    adapted.peft_config["default"].base_model_name_or_path = str(folder / "base") if base is None else base
    adapted.save_pretrained(folder / "lora")
    return adapted


@pytest.mark.parametrize("base", [None, "../base"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "bert"])
def test_it_is_read_as_what_it_makes_of_its_base(family: str, base: str | None, tmp_path: Path) -> None:
    expected = logits(adapters(tmp_path, family, base))
    loaded = load_model(tmp_path / "lora", "cpu")
    torch.testing.assert_close(logits(loaded.model), expected, rtol=1e-4, atol=1e-5)
    assert loaded.tokenizer.get_vocab() == tokenizer_of(family).get_vocab()
    assert not (tmp_path / "lora" / "config.json").exists()


def test_teacher_and_student(tmp_path: Path) -> None:
    expected, path = logits(adapters(tmp_path)), str(tmp_path / "lora")
    teacher, tokenizer, _ = load_teacher(TeacherConfig(path=path), CAUSAL)
    student = make_student(StudentConfig(init="pretrained", path=path), teacher, tokenizer, 12, CAUSAL)
    for model in (teacher, student):
        torch.testing.assert_close(logits(model), expected, rtol=1e-4, atol=1e-5)


def test_a_classifier_that_learnt_by_adapters(tmp_path: Path) -> None:
    expected = logits(adapters(tmp_path, "bert", task_type="SEQ_CLS"))
    torch.testing.assert_close(logits(load_model(tmp_path / "lora", "cpu").model), expected, rtol=1e-4, atol=1e-5)


def test_other_adapters_are_merged_anew(tmp_path: Path) -> None:
    first = adapters(tmp_path)
    load_model(tmp_path / "lora", "cpu")
    for name, weight in first.named_parameters():
        if "lora" in name:
            weight.data.mul_(2)
    first.save_pretrained(tmp_path / "lora")
    torch.testing.assert_close(logits(load_model(tmp_path / "lora", "cpu").model), logits(first), rtol=1e-4, atol=1e-5)


def test_weights_that_neither_has_are_not_made_up(tmp_path: Path) -> None:
    adapters(tmp_path, "bert", task_type="SEQ_CLS")
    make_family("bert").save_pretrained(tmp_path / "base")
    with pytest.raises(SettingError, match="pooler"):
        load_model(tmp_path / "lora", "cpu")


def broken(name: str, folder: Path) -> None:
    config = json.loads((folder / "adapter_config.json").read_text())
    if name == "no base":
        config["base_model_name_or_path"] = None
    if name == "base that is not there":
        config["base_model_name_or_path"] = "/nowhere/at/all"
    (folder / "adapter_config.json").write_text(json.dumps(config))
    if name == "no weights":
        (folder / "adapter_model.safetensors").unlink()


@pytest.mark.parametrize("name", ["no base", "base that is not there", "no weights"])
def test_one_that_is_not_whole_is_refused(name: str, tmp_path: Path) -> None:
    adapters(tmp_path)
    broken(name, tmp_path / "lora")
    with pytest.raises(SettingError, match="adapters") as raised:
        load_model(tmp_path / "lora", "cpu")
    assert raised.value.setting == "model" and raised.value.cure
