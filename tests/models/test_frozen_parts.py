"""Parts of a student that stay as they are."""

from pathlib import Path

import pytest
import torch
from families import make_family
from job import Shelf, weights
from safetensors.torch import load_file
from tiny import make_model

from distill.models.frozen import freeze
from distill.runtime.errors import SettingError

SAME = ["student.layers=[0,1]", "student.dropout=0"]


def trained(model: torch.nn.Module) -> set[str]:
    return {name for name, each in model.named_parameters() if each.requires_grad}


@pytest.mark.parametrize("family", ["bert", "distilbert", "roberta", "modernbert", "gpt2", "llama"])
def test_the_parts_that_are_named_are_frozen_and_no_others(family: str) -> None:
    model = make_family(family)
    before = trained(model)
    freeze(model, ["embeddings", 0])
    gone = before - trained(model)
    assert gone and any("embed" in name or "wte" in name for name in gone)
    blocks = {name for name in before if any(f".{number}." in name for number in (0,))}
    assert blocks <= gone
    assert not any(".1." in name for name in gone)
    assert all("embed" in name or "wte" in name or "wpe" in name for name in gone - blocks)


@pytest.mark.parametrize("frozen", [["head"], [2], [-1], [True]])
def test_what_is_no_part_is_refused(frozen: list[object]) -> None:
    with pytest.raises(SettingError, match=r"student\.frozen=.*has 0 to 1"):
        freeze(make_model("bert", 2), frozen)  # type: ignore[arg-type]


def test_a_block_that_is_called_several_times_is_refused() -> None:
    with pytest.raises(SettingError, match="calls one block several times"):
        freeze(make_model("albert", 4), [0])
    model = make_model("albert", 4)
    freeze(model, ["embeddings"])
    assert any("embeddings" in name for name in {name for name, _ in model.named_parameters()} - trained(model))


@pytest.fixture(scope="module")
def frozen(shelf: Shelf) -> Path:
    folder = shelf.root / "frozen"
    assert shelf.run(folder, *SAME, "student.frozen=[embeddings,0]") == 0
    return folder


def test_frozen_weights_stay_those_of_the_teacher(shelf: Shelf, frozen: Path) -> None:
    teacher = load_file(shelf.teacher / "student" / "model.safetensors")
    student = weights(frozen)
    query = "bert.encoder.layer.{}.attention.self.query.weight"
    assert torch.equal(student["distilbert.transformer.layer.0.attention.q_lin.weight"], teacher[query.format(0)])
    assert not torch.equal(student["distilbert.transformer.layer.1.attention.q_lin.weight"], teacher[query.format(1)])
    words = "embeddings.word_embeddings.weight"
    assert torch.equal(student[f"distilbert.{words}"], teacher[f"bert.{words}"])
