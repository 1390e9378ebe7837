"""The teacher as training asks it: the same function within the rounding, and the teacher itself is left alone."""

from typing import Any

import pytest
import tiny
import torch

from distill.config import Precision
from distill.kernels import packed_linear as frozen
from distill.kernels.attention import use_batched_products
from distill.kernels.packed_linear import PackedLinear, for_evaluation, for_training
from distill.kernels.precision import autocast
from distill.models.load import TRANSFORMS, hidden_states, logits

CPU = torch.device("cpu")


def answers(model: Any, precision: str, padded: bool) -> torch.Tensor:
    """Logits at all positions, float32."""
    ids = torch.from_numpy(tiny.make_rows(4, shortest=5 if padded else None, seed=3)).long()
    attention = ids != tiny.PAD if padded else None
    with torch.no_grad(), autocast(precision, CPU):
        return logits(model, hidden_states(model, ids, attention).flatten(0, 1), tiny.VOCAB).float()


@pytest.mark.parametrize("family", sorted(TRANSFORMS))
@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-5), ("bf16", 0.03)])
@pytest.mark.parametrize("packs", [True, False], ids=["packed", "rounded"])
def test_it_answers_as_the_teacher_does(
    family: str, precision: str, tolerance: float, packs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frozen, "_can_pack", lambda dtype: packs)
    teacher = tiny.make_model(family, 2).eval().requires_grad_(False)
    before = {name: tensor.clone() for name, tensor in teacher.state_dict().items()}
    laid_out = for_training(teacher, Precision(teacher=precision), CPU)
    assert any(isinstance(module, PackedLinear) for module in laid_out.modules()) == packs
    for padded in (False, True):
        expected = answers(teacher, "fp32", padded)
        torch.testing.assert_close(answers(laid_out, precision, padded), expected, rtol=tolerance, atol=tolerance)
    assert all(torch.equal(tensor, before[name]) for name, tensor in teacher.state_dict().items())
    assert not any(isinstance(module, PackedLinear) for module in teacher.modules())


def test_all_but_the_linear_layers_is_shared() -> None:
    teacher = tiny.make_model("bert", 2).eval().requires_grad_(False)
    laid_out = for_training(teacher, Precision(teacher="bf16"), CPU)
    ours, theirs = laid_out.get_input_embeddings(), teacher.get_input_embeddings()
    assert ours.weight is theirs.weight
    assert laid_out.get_output_embeddings().weight.dtype == torch.bfloat16
    assert teacher.get_output_embeddings().weight is theirs.weight and theirs.weight.dtype == torch.float32


def test_an_unknown_family_is_left_as_it_is() -> None:
    teacher = tiny.make_model("bert", 1).eval()
    teacher.config.model_type = "mine"
    assert for_training(teacher, Precision(teacher="bf16"), CPU) is teacher


@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-5), ("bf16", 0.03)])
def test_evaluation_sees_the_present_weights(precision: str, tolerance: float) -> None:
    student = tiny.make_model("distilbert", 2).eval()
    for _ in range(2):
        laid_out = for_evaluation(student, precision, CPU)
        assert any(isinstance(module, PackedLinear) for module in laid_out.modules())
        with torch.no_grad():
            expected = answers(student, "fp32", True)
            torch.testing.assert_close(answers(laid_out, precision, True), expected, rtol=tolerance, atol=tolerance)
            for parameter in student.parameters():
                parameter.add_(0.01)


def test_evaluation_treats_all_models_alike() -> None:
    """A student that has trained attends by other kernels; neither scores nor speeds may owe anything to that."""
    teacher, student = tiny.make_model("bert", 1).eval(), tiny.make_model("bert", 1).eval()
    use_batched_products(student)
    kinds = {for_evaluation(model, "bf16", CPU).config._attn_implementation for model in (teacher, student)}
    assert len(kinds) == 1 and teacher.config._attn_implementation == "sdpa"


def test_what_evaluation_takes_as_it_is() -> None:
    student = tiny.make_model("bert", 1).eval()
    assert for_evaluation(student, "fp32", torch.device("cuda")) is student
    assert for_evaluation(torch.nn.Linear(1, 1), "fp32", CPU).__class__ is torch.nn.Linear
    student.base_model.compile()
    assert for_evaluation(student, "fp32", CPU) is student
