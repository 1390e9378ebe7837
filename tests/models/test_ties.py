"""A head of its own stays one, and a tied one stays tied, whatever the configuration says of them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from families import CAUSAL, FAMILIES, make_family, tokenizer_of
from safetensors.torch import load_file, save_file
from tiny import VOCAB
from torch import nn

from distill.commands.api.pair import load_pair
from distill.config.settings import StudentConfig
from distill.models.export_folder import export
from distill.models.kind import CAUSAL as CAUSAL_KIND
from distill.models.kind import MASKED, ModelKind
from distill.models.load import load_pretrained
from distill.models.loaded import load_model
from distill.models.student import make_student
from distill.models.weights import word_embeddings
from distill.runtime.errors import SettingError

IDS = torch.arange(5, 17)[None]


def kind_of(family: str) -> ModelKind:
    return CAUSAL_KIND if family in CAUSAL else MASKED


def written(model: Any, family: str, folder: Path) -> Path:
    model.save_pretrained(folder)
    tokenizer_of(family).save_pretrained(folder)
    return folder


def own_head(folder: Path, model: Any) -> None:
    """Write a head that is not the embeddings into the file of a model whose configuration ties them."""
    names, file = word_embeddings(model), folder / "model.safetensors"
    assert names is not None
    tensors = load_file(file)
    torch.manual_seed(9)
    tensors[names[0]] = tensors[names[1]] + 0.3 * torch.randn_like(tensors[names[1]])
    save_file(tensors, file, {"format": "pt"})
    assert (
        "tie_word_embeddings" not in (config := json.loads((folder / "config.json").read_text()))
        or config["tie_word_embeddings"]
    )


def says_tied(folder: Path) -> bool:
    return bool(json.loads((folder / "config.json").read_text())["tie_word_embeddings"])


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model.eval()(input_ids=IDS).logits


@pytest.mark.parametrize("family", FAMILIES)
def test_a_head_of_its_own_under_a_configuration_that_ties_it(family: str, tmp_path: Path) -> None:
    model, kind = make_family(family, tie_word_embeddings=True), kind_of(family)
    folder = written(model, family, tmp_path / "teacher")
    own_head(folder, model)
    expected = logits(type(model).from_pretrained(folder))
    teacher, tokenizer = load_pretrained("teacher.path", str(folder), kind), tokenizer_of(family)
    assert torch.equal(logits(teacher), expected) and not torch.equal(logits(model), expected)
    starts = (StudentConfig(layers=[0, 1], dropout=0.0), StudentConfig(init="pretrained", path=str(folder)))
    for number, settings in enumerate(starts):
        student = make_student(settings, teacher, tokenizer, 12, kind)
        torch.testing.assert_close(logits(student), expected, rtol=0, atol=1e-5)
        export(student, tokenizer, tmp_path / f"student{number}", "")
        assert not says_tied(tmp_path / f"student{number}")
        again = type(student).from_pretrained(tmp_path / f"student{number}")
        torch.testing.assert_close(logits(again), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", ["bert", "roberta", "albert", "distilbert", "gpt2", "llama"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_head_that_a_program_has_exchanged(family: str, tied: bool, tmp_path: Path) -> None:
    """Tied by its configuration alone, or by its weights alone."""
    model = make_family(family, tie_word_embeddings=not tied)
    names, embeddings = word_embeddings(model), model.get_input_embeddings().weight
    assert names is not None
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
    teacher = load_pretrained("teacher.path", str(folder), CAUSAL_KIND)
    changes: dict[str, Any] = {"config": {"tie_word_embeddings": True}}
    settings = StudentConfig(init="pretrained", path=str(folder), **changes) if saved else StudentConfig(**changes)
    with pytest.raises(SettingError) as raised:
        make_student(settings, teacher, tokenizer_of("llama"), 12, CAUSAL_KIND)
    assert raised.value.setting == "student.config.tie_word_embeddings"


@pytest.mark.parametrize("name", ["lm_head.weight", "lm_head.bias"])
def test_a_head_of_which_file_and_configuration_disagree(name: str, tmp_path: Path) -> None:
    """Its weight is in neither place, or it has a bias that its class does not add."""
    folder = written(make_family("llama", tie_word_embeddings=name.endswith("bias")), "llama", tmp_path / "teacher")
    tensors = load_file(folder / "model.safetensors")
    tensors = {**tensors, name: torch.ones(VOCAB)} if tensors.pop(name, None) is None else tensors
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(SettingError, match=name) as raised:
        load_pretrained("teacher.path", str(folder), CAUSAL_KIND)
    assert raised.value.setting == "teacher.path" and raised.value.cure
