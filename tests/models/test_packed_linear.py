"""The teacher as training runs it, and GELU as one operator: the same function; the teacher itself is left alone."""

import copy
from typing import Any

import families
import pytest
import tiny
import torch
from torch import nn
from transformers.activations import NewGELUActivation

from distill.config.settings import BackendConfig, PrecisionConfig
from distill.distributed.single import Single
from distill.models.kernels import FAMILIES, packed_linear
from distill.models.kernels.attention import use_batched_products
from distill.models.kernels.packed_linear import (
    PackedLinear,
    can_pack,
    pack_for_evaluation,
    pack_teacher,
    use_one_gelu,
)
from distill.models.language_model import LAST, LanguageModel, OutputSpec
from distill.runs.setup import setup_student, setup_teacher

CPU = torch.device("cpu")
NO_BF16 = "this processor has no packed products in bf16"  # such as one without AVX-512


def answers(model: Any, precision: str, padded: bool) -> torch.Tensor:
    """Logits at all positions, float32."""
    ids = torch.from_numpy(tiny.make_rows(4, shortest=5 if padded else None, seed=3)).long()
    attention = ids != tiny.PAD if padded else None
    with torch.no_grad():
        return tiny.all_logits(model, ids, attention, precision).float()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("precision", "tolerance", "packs"),
    [("fp32", 1e-6, True), ("fp32", 1e-6, False), ("bf16", 0.02, True), ("bf16", 0.02, False), ("fp16", 0.005, False)],
)
def test_it_answers_as_the_teacher_does(
    family: str, precision: str, tolerance: float, packs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if packs and not can_pack(torch.float32 if precision == "fp32" else torch.bfloat16):
        pytest.skip(NO_BF16)
    if precision != "fp16":  # which this finds out by itself
        monkeypatch.setattr(packed_linear, "can_pack", lambda dtype: packs)
    teacher = families.make_family(family).requires_grad_(False)
    before = {name: tensor.clone() for name, tensor in teacher.state_dict().items()}
    packed = pack_teacher(teacher, PrecisionConfig(teacher=precision), CPU)
    assert any(isinstance(module, PackedLinear) for module in packed.modules()) == packs
    for padded in (False, True):
        expected = answers(teacher, "fp32", padded)
        assert (answers(packed, precision, padded) - expected).norm() < tolerance * expected.norm()
    assert all(torch.equal(tensor, before[name]) for name, tensor in teacher.state_dict().items())
    assert not any(isinstance(module, PackedLinear) for module in teacher.modules())


@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-5), ("bf16", 0.03)])
def test_evaluation_sees_the_present_weights(precision: str, tolerance: float) -> None:
    if precision == "bf16" and not can_pack(torch.bfloat16):
        pytest.skip(NO_BF16)
    student = tiny.make_model("distilbert", 2).eval()
    for _ in range(2):
        packed = pack_for_evaluation(student, PrecisionConfig(evaluate=precision), CPU)
        assert any(isinstance(module, PackedLinear) for module in packed.modules())
        with torch.no_grad():
            expected = answers(student, "fp32", True)
            torch.testing.assert_close(answers(packed, precision, True), expected, rtol=tolerance, atol=tolerance)
            for parameter in student.parameters():
                parameter.add_(0.01)


def test_evaluation_treats_all_models_alike() -> None:
    """A student that has trained attends by other kernels; neither scores nor speeds may owe anything to that."""
    teacher, student = tiny.make_model("bert", 1).eval(), tiny.make_model("bert", 1).eval()
    use_batched_products(student)
    kinds = {
        pack_for_evaluation(model, PrecisionConfig(evaluate="fp32"), CPU).config._attn_implementation
        for model in (teacher, student)
    }
    assert len(kinds) == 1 and teacher.config._attn_implementation == "sdpa"


def test_what_evaluation_takes_as_it_is() -> None:
    student = tiny.make_model("bert", 1).eval()
    for precision in (
        PrecisionConfig(compile=True),
        PrecisionConfig(kernels="plain"),
        PrecisionConfig(evaluate="fp16"),
    ):
        assert pack_for_evaluation(student, precision, CPU) is student
    assert pack_for_evaluation(torch.nn.Linear(1, 1), PrecisionConfig(), CPU).__class__ is torch.nn.Linear
    assert pack_for_evaluation(student, PrecisionConfig(), CPU) is not student


def test_a_gpu_lays_nothing_out_but_has_torchs_activation() -> None:
    """As the student in training has it, so that teacher and baseline are timed alike."""
    model = families.make_family("gpt2").eval()
    copied = pack_for_evaluation(model, PrecisionConfig(), torch.device("cuda"))
    assert copied is not model and not any(isinstance(module, PackedLinear) for module in copied.modules())
    assert all(one is other for one, other in zip(model.parameters(), copied.parameters(), strict=True))
    assert type(model.base_model.h[0].mlp.act) is not type(copied.base_model.h[0].mlp.act)


@pytest.mark.parametrize("operator", ["gone", "something else", "another activation"])
def test_without_its_private_operators_torchs_own_layers_run(operator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are no promise of torch: another release may rename them or give them another meaning."""
    right = PackedLinear.forward

    def broken(layer: PackedLinear, x: torch.Tensor) -> torch.Tensor:
        if operator == "gone":
            raise AttributeError("'_OpNamespace' 'mkldnn' object has no attribute '_linear_pointwise'")
        if operator == "another activation" and layer.then == ("none", ""):
            return right(layer, x)
        return torch.zeros(len(x), 32)

    monkeypatch.setattr(PackedLinear, "forward", broken)
    can_pack.cache_clear()
    try:
        assert not can_pack(torch.float32)
        teacher = tiny.make_model("bert", 1).eval().requires_grad_(False)
        packed = pack_teacher(teacher, PrecisionConfig(), CPU)
        assert not any(isinstance(module, PackedLinear) for module in packed.modules())
    finally:
        can_pack.cache_clear()


# --- GELU


def count(model: Any, kind: type[nn.Module]) -> int:
    return sum(type(module) is kind for module in model.modules())


def hidden(model: Any) -> torch.Tensor:
    ids = torch.from_numpy(tiny.make_rows(4)).long()
    return LanguageModel(model)({"input_ids": ids}, None, OutputSpec(layers=(LAST,))).hidden[LAST]


@pytest.mark.parametrize("family", ["gpt2", "albert"])
def test_value_and_gradient_are_those_of_the_formula(family: str) -> None:
    fields = {"hidden_act": "gelu_new"} if family == "albert" else {}
    model = families.without_dropout(family, **fields).train()
    changed = copy.deepcopy(model)
    use_one_gelu(changed)
    assert count(model, NewGELUActivation) == count(changed, nn.GELU) > 0
    assert count(changed, NewGELUActivation) == 0 and list(changed.state_dict()) == list(model.state_dict())
    found = []
    for each in (changed, model):
        output = hidden(each)
        output.square().sum().backward()
        gradients = [p.grad.flatten() for p in each.parameters() if p.grad is not None]
        found.append((output.detach(), torch.cat(gradients)))
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-5, atol=1e-5)
    assert (found[0][1] - found[1][1]).norm() < 1e-5 * found[1][1].norm()


@pytest.mark.parametrize("kernels", ["auto", "plain"])
def test_a_pair_in_training_has_it_unless_its_kernels_are_plain(kernels: str) -> None:
    student, teacher = families.make_family("gpt2"), families.make_family("gpt2").requires_grad_(False)
    objective = tiny.make_objective(tiny.objective_config(), student, teacher)
    ranks = Single(BackendConfig(device="cpu"))
    frozen = setup_teacher(teacher, PrecisionConfig(kernels=kernels), ranks)
    setup_student(student, objective, PrecisionConfig(kernels=kernels), ranks)
    plain = 2 if kernels == "plain" else 0
    assert count(student, NewGELUActivation) == count(frozen.model, NewGELUActivation) == plain
    assert count(teacher, NewGELUActivation) == 2, "which the report scores"


def test_a_packed_gpt2_multiplies_and_activates_at_once() -> None:
    model = families.make_family("gpt2")
    packed = pack_for_evaluation(model, PrecisionConfig(), CPU)
    assert count(packed, nn.GELU) == 0 and packed.transformer.h[0].mlp.c_fc.then == ("gelu", "tanh")
    torch.testing.assert_close(hidden(packed), hidden(model), rtol=1e-5, atol=1e-5)
    relu = families.make_family("gpt2", activation_function="relu")
    packed = pack_for_evaluation(relu, PrecisionConfig(), CPU)
    assert packed.transformer.h[0].mlp.c_fc.then == ("none", "")
    torch.testing.assert_close(hidden(packed), hidden(relu), rtol=1e-5, atol=1e-5)
