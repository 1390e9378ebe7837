"""Weights that were saved from inside of a wrapper are read, as long as their names say which they are."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from families import CAUSAL, make_family, tokenizer_of
from safetensors.torch import load_file, save_file
from tiny import VOCAB

from distill.models.kind import CAUSAL as CAUSAL_KIND
from distill.models.kind import CLASSES, MASKED
from distill.models.load import load_pretrained
from distill.runtime.errors import SettingError

Names = Callable[[str], str]
NAMES: dict[str, Names] = {
    prefix: lambda name, prefix=prefix: prefix + name  # type: ignore[misc]
    for prefix in ("_orig_mod.", "module.", "base_model.model.", "model.", "module._orig_mod.", "student.net.")
}
NAMES["compiled blocks"] = lambda name: name.replace(".0.", ".0._orig_mod.").replace(".1.", ".1._orig_mod.")
NAMES["fsdp"] = lambda name: "_fsdp_wrapped_module." + name.replace(".1.", ".1._fsdp_wrapped_module.")


def saved(family: str, names: Names, folder: Path, **more: torch.Tensor) -> Any:
    model = make_family(family)
    model.save_pretrained(folder)
    tokenizer_of(family).save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    save_file(
        {**{names(name): tensor for name, tensor in tensors.items()}, **more},
        folder / "model.safetensors",
        {"format": "pt"},
    )
    return model


@pytest.mark.parametrize("family", ["llama", "gpt2", "bert"])
@pytest.mark.parametrize("names", NAMES)
def test_a_wrapper_in_the_names(names: str, family: str, tmp_path: Path) -> None:
    model = saved(family, NAMES[names], tmp_path)
    kind = CAUSAL_KIND if family in CAUSAL else MASKED
    for mapped in (False, True):
        loaded = load_pretrained("teacher.path", str(tmp_path), kind, mapped=mapped)
        assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in loaded.state_dict().items())


def test_the_encoder_of_a_wrapped_model_gets_a_new_head(tmp_path: Path) -> None:
    model = saved("bert", lambda name: "module." + name, tmp_path)
    loaded = load_pretrained("student.path", str(tmp_path), CLASSES, new_heads=True)
    expected = model.bert.state_dict()
    assert all(
        torch.equal(tensor, expected[name]) for name, tensor in loaded.bert.state_dict().items() if name in expected
    )


REFUSED: dict[str, tuple[Names, dict[str, torch.Tensor]]] = {
    "module.": (lambda name: "module." + name, {"lm_head.weight": torch.zeros(VOCAB, 32)}),
    "lora_A": (
        lambda name: "base_model.model." + name,
        {"base_model.model.x.lora_A.default.weight": torch.zeros(2, 2)},
    ),
    "other.": (lambda name: f"other.{hash(name)}", {}),
}


@pytest.mark.parametrize("prefix", REFUSED)
def test_other_names_are_refused_with_one_of_them(prefix: str, tmp_path: Path) -> None:
    names, more = REFUSED[prefix]
    saved("llama", names, tmp_path, **more)
    with pytest.raises(SettingError, match=prefix) as raised:
        load_pretrained("teacher.path", str(tmp_path), CAUSAL_KIND)
    assert raised.value.cure
