"""Loading models and tokenizers, and what is refused."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import CLS, VOCAB, make_model, make_tokenizer

from distill.config.settings import TeacherConfig
from distill.models.check import check_tokenizers, check_vocabulary
from distill.models.load import load_pretrained, load_tokenizer, size
from distill.models.loaded import device_of
from distill.models.teacher import load_teacher
from distill.runtime.errors import SettingError


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "bert"
    make_model("bert", 2).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def refusal(error: pytest.ExceptionInfo[SettingError]) -> str:
    text = str(error.value)
    assert "\n" not in text and text
    return text


def test_size_counts_tied_weights_once() -> None:
    model = make_model("bert", 1)
    names = {p.data_ptr(): p.numel() for p in model.parameters()}
    assert size(model) == (sum(names.values()), 4 * sum(names.values()))
    assert size(model.bfloat16())[1] == 2 * sum(names.values())


def test_teacher_loads_frozen_and_in_fp32(saved: Path, tmp_path: Path) -> None:
    half = tmp_path / "half"
    shutil.copytree(saved, half)
    make_model("bert", 2).bfloat16().save_pretrained(half)
    for folder in (saved, half):
        model, tokenizer, name = load_teacher(TeacherConfig(path=str(folder)))
        assert name == str(folder) and tokenizer.get_vocab() == make_tokenizer().get_vocab()
        assert not model.training and not any(p.requires_grad for p in model.parameters())
        assert {p.dtype for p in model.parameters()} == {torch.float32}
    ids = torch.tensor([[CLS, 7, 8, 9]])
    own = load_teacher(TeacherConfig(path=str(saved)))[0]
    torch.testing.assert_close(own(ids).logits, make_model("bert", 2)(ids).logits.detach())


def test_a_run_folder_stands_for_its_student(saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved, tmp_path / "run" / "student")
    assert load_teacher(TeacherConfig(path=str(tmp_path / "run")))[0].config.num_hidden_layers == 2


@pytest.mark.parametrize(
    ("teacher", "words"),
    [
        (TeacherConfig(), ("teacher.path=null",)),
        (TeacherConfig(path="/nowhere/at/all"), ("teacher.path=/nowhere/at/all",)),
    ],
)
def test_impossible_teachers_are_refused(teacher: TeacherConfig, words: tuple[str, ...]) -> None:
    with pytest.raises(SettingError) as error:
        load_teacher(teacher)
    assert all(word in refusal(error) for word in words)


def test_damaged_weights_are_refused(saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved, tmp_path / "cut")
    weights = tmp_path / "cut" / "model.safetensors"
    for content in (weights.read_bytes()[:-100], b"no weights"):
        weights.write_bytes(content)
        with pytest.raises(SettingError) as error:
            load_pretrained("teacher.path", str(tmp_path / "cut"))
        assert f"teacher.path={tmp_path / 'cut'}" in refusal(error)


def test_a_model_without_a_trained_head_is_refused(tmp_path: Path) -> None:
    """transformers would fill the gap with random weights: a teacher that teaches noise."""
    make_model("bert", 1).bert.save_pretrained(tmp_path / "headless")
    with pytest.raises(SettingError) as error:
        load_pretrained("teacher.path", str(tmp_path / "headless"))
    assert "cls.predictions" in refusal(error)


def test_a_causal_model_is_refused(tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=1, n_head=1, vocab_size=50)).save_pretrained(tmp_path)
    with pytest.raises(SettingError) as error:
        load_pretrained("teacher.path", str(tmp_path))
    assert "masked language model" in refusal(error)


def test_tokenizers_that_do_not_fit_are_refused(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(SettingError) as error:
        load_tokenizer("teacher.path", str(tmp_path))
    assert f"teacher.path={tmp_path}" in refusal(error)
    maskless = make_tokenizer()
    maskless.mask_token = None
    maskless.save_pretrained(tmp_path / "maskless")
    with pytest.raises(SettingError) as error:
        load_tokenizer("student.path", str(tmp_path / "maskless"))
    assert "mask token" in refusal(error)


def test_pairs_that_do_not_fit_are_refused(tokenizer: Any, teacher: Any) -> None:
    check_vocabulary(teacher, "teacher", tokenizer)
    check_vocabulary(make_model("distilbert", 1), "student", tokenizer)
    check_vocabulary(make_model("bert", 1, vocab=VOCAB + 24), "student", tokenizer)  # padded for speed
    with pytest.raises(SettingError) as error:
        check_vocabulary(make_model("bert", 1, vocab=VOCAB - 1), "student", tokenizer)
    assert "student" in refusal(error) and str(VOCAB - 1) in refusal(error) and str(VOCAB) in refusal(error)


def test_other_vocabularies_are_refused_by_name(tokenizer: Any) -> None:
    check_tokenizers(tokenizer, make_tokenizer(), "x")
    with pytest.raises(SettingError) as error:
        check_tokenizers(tokenizer, make_tokenizer(("whale",)), "student.path=folder/of/student")
    assert "student.path=folder/of/student" in refusal(error) and f"({VOCAB + 1} tokens)" in refusal(error)


def test_weights_for_ranks_are_in_the_format_of_their_files(tmp_path: Path) -> None:
    """Whatever config.json names: conversions leave the format of another model there."""
    make_model("bert", 1).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"dtype": "float16", "torch_dtype": "float16"}))
    model = load_pretrained("teacher.path", str(tmp_path), mapped=True)
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}


@pytest.mark.parametrize("name", ["mps", "xpu", "meta"])
def test_devices_that_torch_alone_knows_are_refused(name: str) -> None:
    assert device_of("cpu") == torch.device("cpu")
    with pytest.raises(SettingError, match=f"^device={name}: give auto, cpu, cuda or cuda:NUMBER$"):
        device_of(name)


def test_adapters_beside_weights_are_refused(saved: Path, tmp_path: Path) -> None:
    """Whether transformers adds them depends on a package that need not be there."""
    shutil.copytree(saved, tmp_path / "both")
    (tmp_path / "both" / "adapter_config.json").write_text("{}")
    with pytest.raises(
        SettingError, match=r"^teacher\.path=.*/both holds adapters beside its weights .*merge_and_unload"
    ):
        load_teacher(TeacherConfig(path=str(tmp_path / "both")))
