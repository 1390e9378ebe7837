"""Parts of a student that stay as they are, and what is then computed once for student and teacher."""

from pathlib import Path
from typing import Any

import pytest
import torch
from families import make_family
from job import Shelf, assert_alike, metrics, weights
from safetensors.torch import load_file
from tiny import make_model

from distill.config.settings import StudentConfig
from distill.models.frozen import freeze, shared_depth
from distill.models.kind import MASKED
from distill.models.known_layers import starting_above
from distill.models.student import from_layers
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


def started(teacher: Any, layers: list[int], **config: Any) -> Any:
    settings = StudentConfig(kind="layers", architecture="distilbert", config=config, dropout=0.0)
    return from_layers(settings, teacher, list(layers), MASKED, share=False).train()


def test_how_many_blocks_are_the_teachers_own() -> None:
    teacher = make_model("bert", 4)
    assert shared_depth(started(teacher, [0, 1, 3]), teacher, ["embeddings", 0, 1], [0, 1, 3]) == 2
    assert shared_depth(started(teacher, [0, 2, 3]), teacher, ["embeddings", 0, 1], [0, 2, 3]) == 1
    student = started(teacher, [0, 1, 2])
    assert shared_depth(student, teacher, ["embeddings"], [0, 1, 2]) == 0
    assert shared_depth(student, teacher, [0, 1], [0, 1, 2]) is None  # its embeddings are trained
    assert shared_depth(make_family("gpt2"), teacher, ["embeddings", 0], [0, 1, 2]) is None
    for module in student.distilbert.transformer.layer[2].modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.1
    assert shared_depth(student, teacher, ["embeddings", 0, 1], [0, 1, 2]) == 2  # above what is shared
    for module in student.distilbert.embeddings.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.1
    assert shared_depth(student, teacher, ["embeddings", 0], [0, 1, 2]) is None


def test_blocks_that_compute_something_else_are_not_the_teachers() -> None:
    """Other settings, other weights, and the word of whoever says which layers it started from."""
    teacher = make_model("bert", 4)
    assert shared_depth(started(teacher, [0, 1], activation="relu"), teacher, ["embeddings", 0], [0, 1]) is None
    assert shared_depth(started(teacher, [1, 2]), teacher, ["embeddings", 0], [0, 1]) is None
    changed = started(teacher, [0, 1])
    with torch.no_grad():
        changed.distilbert.transformer.layer[0].ffn.lin2.weight *= 1.5
    assert shared_depth(changed, teacher, ["embeddings", 0], [0, 1]) is None
    held = started(teacher, [0, 1])
    held.distilbert.transformer.layer[0].forward = held.distilbert.transformer.layer[0].forward  # somebody's wrapper
    assert shared_depth(held, teacher, ["embeddings", 0], [0, 1]) is None


@torch.no_grad()
@pytest.mark.parametrize("family", ["bert", "distilbert", "roberta"])
def test_beginning_with_the_state_of_a_block_gives_the_same(family: str) -> None:
    model, ids = make_model(family, 3), torch.randint(8, 40, (2, 7))
    whole = model(input_ids=ids, output_hidden_states=True)
    for depth in (0, 1, 2):
        with starting_above(model, depth, whole.hidden_states[depth]):
            found = model(input_ids=ids).logits
        assert torch.equal(found, whole.logits)
    assert torch.equal(model(input_ids=ids).logits, whole.logits)  # as before


@pytest.fixture(scope="module")
def shared(shelf: Shelf) -> Path:
    folder = shelf.root / "frozen"
    assert shelf.run(folder, *SAME, "student.frozen=[embeddings,0]") == 0
    return folder


def test_sharing_gives_the_student_that_computes_everything_itself(shelf: Shelf, shared: Path) -> None:
    own = shelf.root / "frozen-own"
    assert shelf.run(own, *SAME, "student.frozen=[embeddings,0]", "precision.kernels=plain") == 0
    assert_alike(shared, own)
    losses = [[line["loss/total"] for line in metrics(folder)] for folder in (shared, own)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_frozen_weights_stay_those_of_the_teacher(shelf: Shelf, shared: Path) -> None:
    teacher = load_file(shelf.teacher / "student" / "model.safetensors")
    student = weights(shared)
    query = "bert.encoder.layer.{}.attention.self.query.weight"
    assert torch.equal(student["distilbert.transformer.layer.0.attention.q_lin.weight"], teacher[query.format(0)])
    assert not torch.equal(student["distilbert.transformer.layer.1.attention.q_lin.weight"], teacher[query.format(1)])
    words = "embeddings.word_embeddings.weight"
    assert torch.equal(student[f"distilbert.{words}"], teacher[f"bert.{words}"])


def test_it_is_said_and_a_term_that_reads_below_prevents_it(shelf: Shelf, shared: Path, lines: list[str]) -> None:
    folder = shelf.root / "frozen-again"
    once = "computed once for both"
    assert shelf.run(folder, *SAME, "student.frozen=[embeddings,0]", "train.steps=1", "train.epochs=null") == 0
    assert sum(once in line for line in lines) == 1
    lines.clear()
    hidden = ["+objective.hidden_mse.weight=1", "+objective.hidden_mse.pairs=[[0,0],[2,4]]"]
    assert (
        shelf.run(shelf.root / "frozen-hidden", *SAME, "student.frozen=[embeddings,0]", *hidden, "train.steps=1") == 0
    )
    assert not any(once in line for line in lines)
    assert sum("computed for it alone" in line for line in lines) == 1
