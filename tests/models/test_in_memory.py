"""Models of a program: by a callable of the user's, and wrapped ones, which are read and trained as what is inside."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import own_models
import pytest
import torch
from families import CAUSAL, make_family, tokenizer_of
from tiny import make_rows, make_tokenizer
from torch import nn
from transformers import T5Config, T5ForConditionalGeneration

from distill.commands.api.pair import load_pair
from distill.config.component import Component
from distill.config.settings import StudentConfig, TeacherConfig
from distill.models.check import check_model
from distill.models.export_folder import export
from distill.models.kind import MASKED
from distill.models.load import load_pretrained
from distill.models.loaded import LoadedModel, custom_model, load_weights, model_digest, unwrapped
from distill.models.student import make_student
from distill.models.teacher import load_teacher
from distill.report.use import use_of_student
from distill.runs.describe import call_of, origin_of
from distill.runtime.errors import SettingError

IDS = torch.from_numpy(make_rows(3).astype("int64"))


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    out = model.eval()(IDS)
    return getattr(out, "logits", out)


# --- by a callable


@pytest.mark.parametrize("name", ["shifted_bert", "Convolutions"])
def test_a_student_by_a_callable_is_saved_with_what_loads_it_and_is_the_next_teacher(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(4)
    made, folder = Component("student", f"own_models.{name}", {}, optional=("path",)), tmp_path / "student"
    model = custom_model(made, None).eval()
    origin = origin_of(model, made.path, causal=False, call=call_of(made, 12, {}))
    export(model, make_tokenizer(), folder, use_of_student(origin, type(model).__name__).code)
    with pytest.raises(SettingError, match=r"teacher=custom .*teacher\._target_="):
        load_pretrained("teacher.path", str(tmp_path))
    settings = TeacherConfig(**{"_target_": f"own_models.{name}", "path": str(tmp_path)})
    teacher, tokenizer, title = load_teacher(settings, MASKED)
    assert title == f"own_models.{name}" and not teacher.training
    assert not any(parameter.requires_grad for parameter in teacher.parameters())
    assert model_digest(teacher, tokenizer) == model_digest(model, tokenizer)
    monkeypatch.chdir(folder)
    found: dict[str, Any] = {}
    exec((folder / "README.md").read_text(), found)  # the card
    torch.testing.assert_close(logits(found["model"]), logits(model))
    assert found["tokenizer"].get_vocab() == make_tokenizer().get_vocab()


def test_weights_of_another_module_are_refused(tmp_path: Path) -> None:
    export(own_models.Convolutions(), make_tokenizer(), tmp_path / "student")
    with pytest.raises(SettingError, match=f"student.path={tmp_path}.*does not fit a Convolutions"):
        load_weights(own_models.Convolutions(width=8), "student.path", str(tmp_path))
    with pytest.raises(SettingError, match=r"student\.path=/nowhere"):
        load_weights(own_models.Convolutions(), "student.path", "/nowhere")


def frozen_model(**_: Any) -> Any:
    return own_models.Convolutions().requires_grad_(False)


def test_what_is_no_language_model_or_learns_nothing_is_refused() -> None:
    model = own_models.Blind()
    model.weight = nn.Parameter(torch.zeros(1))
    with pytest.raises(SettingError, match=r"base_model, get_output_embeddings.*docs/how-to/extend\.md"):
        check_model(model, "student")
    made = StudentConfig(**{"_target_": f"{__name__}.frozen_model"})
    with pytest.raises(SettingError, match=r"^student\._target_=.*frozen_model: no weight .* requires_grad_\(True\)"):
        make_student(made, None, None, 12)  # type: ignore[arg-type]


# --- wrapped


def adapted(model: Any) -> Any:
    """Of PEFT, with adapters that change something."""
    peft = pytest.importorskip("peft")
    made = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj", "query"]))
    for name, weight in made.named_parameters():
        if "lora" in name:
            nn.init.normal_(weight, std=0.3)
    return made.eval()


def compiled_in_place(model: Any) -> Any:
    model.compile(backend="eager")
    return model


WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "torch.compile": lambda model: torch.compile(model, backend="eager"),
    "compile()": compiled_in_place,
    "DataParallel": nn.DataParallel,
    "both": lambda model: torch.compile(nn.DataParallel(model), backend="eager"),
    "PEFT": adapted,
    "PEFT, compiled": lambda model: torch.compile(adapted(model), backend="eager"),
}


def inside(model: Any) -> Any:
    """By torch and PEFT alone: the model as it computes, without compiling or spreading over devices."""
    while True:
        if "_orig_mod" in model._modules:
            model = model._orig_mod
        elif isinstance(model, nn.DataParallel):
            model = model.module
        else:
            return copy.copy(model)  # without what compile() has put into it


@pytest.mark.parametrize("family", ["llama", "bert"])
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_what_is_inside_of_a_wrapper_is_read(wrapper: str, family: str) -> None:
    plain = make_family(family)
    wrapped, tokenizer = WRAPPERS[wrapper](copy.deepcopy(plain)), tokenizer_of(family)
    expected = logits(inside(wrapped))
    assert torch.equal(expected, logits(plain)) != wrapper.startswith("PEFT")
    held = LoadedModel.of(wrapped, tokenizer)
    assert held.kind.causal == (family in CAUSAL)
    torch.testing.assert_close(logits(held.model), expected)
    before = {name: tensor.clone() for name, tensor in wrapped.state_dict().items()}
    student = load_pair((wrapped, tokenizer), layers=[0, 1]).student.model
    torch.testing.assert_close(logits(student), expected, rtol=1e-4, atol=1e-5)
    assert type(student) is type(plain) and not any("lora" in name for name in student.state_dict())
    assert all(torch.equal(tensor, before[name]) for name, tensor in wrapped.state_dict().items())


def test_adapters_of_a_student_are_what_it_learns() -> None:
    wrapped = adapted(make_family("llama"))
    student = unwrapped(wrapped, "student", learns=True)
    learnt = [name for name, weight in student.named_parameters() if weight.requires_grad]
    assert learnt and all("lora" in name for name in learnt)
    torch.testing.assert_close(logits(student), logits(wrapped))


def prompted() -> Any:
    peft = pytest.importorskip("peft")
    settings = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    return peft.get_peft_model(make_family("llama"), settings)


def t5() -> Any:
    return T5ForConditionalGeneration(T5Config(vocab_size=40, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=4))


@pytest.mark.parametrize("build", [prompted, lambda: make_family("llama").model, lambda: make_family("bert").bert, t5])
@pytest.mark.parametrize("setting", ["teacher", "student"])
def test_what_is_not_read_is_refused_by_its_class(setting: str, build: Callable[[], Any]) -> None:
    model, tokenizer = build(), tokenizer_of("llama")
    sound, refused = (make_family("llama"), tokenizer), (model, tokenizer)
    with pytest.raises(SettingError) as raised:
        load_pair(*((refused,) if setting == "teacher" else (sound, refused)))
    line = str(raised.value)
    assert raised.value.setting == setting and f"{type(model).__name__} " in line and raised.value.cure
