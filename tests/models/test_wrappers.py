"""Models in memory that are wrapped are read and trained as what is inside; others are refused by their class."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from families import CAUSAL, make_family, tokenizer_of
from torch import nn
from transformers import T5Config, T5ForConditionalGeneration

from distill.commands.api.pair import load_pair
from distill.models.loaded import LoadedModel, unwrapped
from distill.runtime.errors import SettingError

peft = pytest.importorskip("peft")
IDS = torch.arange(5, 17)[None]


def adapted(model: Any, **more: Any) -> Any:
    """Of PEFT, with adapters that change something."""
    made = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj", "query"], **more))
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


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model.eval()(input_ids=IDS).logits


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


def inside(model: Any) -> Any:
    """By torch and PEFT alone: the model as it computes, without compiling or spreading over devices."""
    while True:
        if "_orig_mod" in model._modules:
            model = model._orig_mod
        elif isinstance(model, nn.DataParallel):
            model = model.module
        else:
            return copy.copy(model)  # without what compile() has put into it


def test_adapters_of_a_student_are_what_it_learns() -> None:
    wrapped = adapted(make_family("llama"))
    student = unwrapped(wrapped, "student", learns=True)
    learnt = [name for name, weight in student.named_parameters() if weight.requires_grad]
    assert learnt and all("lora" in name for name in learnt)
    torch.testing.assert_close(logits(student), logits(wrapped))


def prompted(model: Any) -> Any:
    return peft.get_peft_model(model, peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))


REFUSED: dict[str, Callable[[], Any]] = {
    "PeftModelForCausalLM": lambda: prompted(make_family("llama")),
    "LlamaModel": lambda: make_family("llama").model,
    "BertModel": lambda: make_family("bert").bert,
    "T5ForConditionalGeneration": lambda: T5ForConditionalGeneration(
        T5Config(vocab_size=40, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=4)
    ),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("setting", ["teacher", "student"])
def test_what_is_not_read_is_refused_by_its_class(setting: str, name: str) -> None:
    sound, refused = (make_family("llama"), tokenizer_of("llama")), (REFUSED[name](), tokenizer_of("llama"))
    with pytest.raises(SettingError) as raised:
        load_pair(*((refused,) if setting == "teacher" else (sound, refused)))
    line = str(raised.value)
    assert raised.value.setting == setting and f"{name} " in line and raised.value.cure and len(line) < 250
