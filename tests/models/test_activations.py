"""GELU as one operator: the same value and gradient, for models whose activation it is and no others."""

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
from distill.models.kernels.activations import use_one_gelu
from distill.models.kernels.packed_linear import pack_for_evaluation
from distill.models.language_model import LAST, LanguageModel, OutputSpec
from distill.runs.setup import setup_student, setup_teacher

CPU = torch.device("cpu")


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


def test_other_activations_and_other_models_are_left_alone() -> None:
    exact, unknown = families.make_family("bert"), families.make_family("gpt2")
    kinds = [type(module) for module in exact.modules()]
    unknown.config.model_type = "mine"
    for model in (exact, unknown):
        use_one_gelu(model)
    assert [type(module) for module in exact.modules()] == kinds
    assert count(unknown, NewGELUActivation) == 2 and count(unknown, nn.GELU) == 0


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
