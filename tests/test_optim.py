"""The optimizer's groups, clipping, and schedules that reach their end."""

import math
from typing import Any

import pytest
import torch
from tiny import make_model
from torch import nn

from distill.config import OptimizerConfig, ScheduleConfig
from distill.optim import build, clip, set_learning_rate
from distill.schedule import lr_scale


@pytest.mark.parametrize("family", ["bert", "distilbert", "roberta", "modernbert", "albert"])
def test_matrices_decay_and_nothing_else(family: str) -> None:
    model = make_model(family, 2)
    optimizer = build(model, OptimizerConfig(weight_decay=0.3))
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert len(decay) == sum(len(group["params"]) for group in optimizer.param_groups), "a parameter stands there twice"
    assert decay.keys() == {id(p) for p in model.parameters()}
    norms = {id(p) for m in model.modules() if isinstance(m, nn.LayerNorm) for p in m.parameters()}
    assert norms
    for name, parameter in model.named_parameters():
        plain = id(parameter) in norms or name.endswith("bias")
        assert decay[id(parameter)] == (0.0 if plain else 0.3), name


def test_settings_reach_adamw() -> None:
    optimizer = build(nn.Linear(2, 2), OptimizerConfig(lr=0.1, betas=(0.8, 0.7), eps=1e-3, weight_decay=0.2))
    assert isinstance(optimizer, torch.optim.AdamW)
    for group in optimizer.param_groups:
        assert (group["lr"], group["betas"], group["eps"]) == (0.1, (0.8, 0.7), 1e-3)
    set_learning_rate(optimizer, 0.05)
    assert [group["lr"] for group in optimizer.param_groups] == [0.05, 0.05]


def test_frozen_parameters_are_left_out() -> None:
    model = nn.Linear(3, 2)
    model.weight.requires_grad_(False)
    assert [p.shape for g in build(model, OptimizerConfig()).param_groups for p in g["params"]] == [(2,)]


def test_one_step_is_adamw_by_hand() -> None:
    model = nn.Linear(2, 1)
    settings = OptimizerConfig(lr=0.1, betas=(0.9, 0.98), eps=1e-6, weight_decay=0.01)
    optimizer = build(model, settings)
    weight, bias = model.weight.detach().clone(), model.bias.detach().clone()
    model(torch.tensor([[1.0, -2.0]])).sum().backward()
    optimizer.step()
    # After bias correction the first step is lr * sign(gradient).
    direction = torch.tensor([[1.0, -2.0]]) / (torch.tensor([[1.0, 2.0]]) + 1e-6)
    torch.testing.assert_close(model.weight.detach(), weight * (1 - 0.1 * 0.01) - 0.1 * direction)
    torch.testing.assert_close(model.bias.detach(), bias - 0.1 / (1 + 1e-6))


def with_gradients(values: list[list[float]]) -> nn.ParameterList:
    parameters = nn.ParameterList([nn.Parameter(torch.zeros(len(value))) for value in values])
    for parameter, value in zip(parameters, values, strict=True):
        parameter.grad = torch.tensor(value)
    return parameters


def test_clip_is_of_the_whole_gradient() -> None:
    model = with_gradients([[3.0, 0.0], [4.0], [12.0]])
    assert float(clip(model, 100.0)) == float(clip(model, None)) == pytest.approx(13.0)
    assert [p.grad.tolist() for p in model] == [[3.0, 0.0], [4.0], [12.0]]  # type: ignore[union-attr]
    assert float(clip(model, 6.5)) == pytest.approx(13.0), "the norm before clipping"
    assert [p.grad.tolist() for p in model] == [[pytest.approx(1.5), 0.0], [pytest.approx(2.0)], [pytest.approx(6.0)]]  # type: ignore[union-attr]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_clip_tells_of_gradients_that_are_not_finite(bad: float) -> None:
    assert not math.isfinite(float(clip(with_gradients([[1.0], [bad]]), 5.0)))


KINDS: dict[str, Any] = {
    "linear": lambda x: 1 - x,
    "cosine": lambda x: (1 + math.cos(math.pi * x)) / 2,
    "constant": lambda x: 1.0,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("warmup", [0.0, 0.05, 0.5])
@pytest.mark.parametrize("floor", [0.0, 0.1])
def test_schedules(kind: str, warmup: float, floor: float) -> None:
    settings = ScheduleConfig(kind, warmup, floor)
    for progress in (0.0, 0.01, 0.2, 0.5, 0.77, 1.0):
        if progress < warmup:
            expected = progress / warmup
        else:
            expected = floor + (1 - floor) * KINDS[kind]((progress - warmup) / (1 - warmup))
        assert lr_scale(settings, progress) == pytest.approx(expected, abs=1e-12)
    assert lr_scale(settings, warmup) == pytest.approx(1.0)
    assert lr_scale(settings, 1.0) == pytest.approx(1.0 if kind == "constant" else floor)


def test_a_run_that_is_all_warmup() -> None:
    assert lr_scale(ScheduleConfig("linear", 1.0), 0.999) == pytest.approx(0.999)
    assert 0 <= lr_scale(ScheduleConfig("linear", 1.0), 1.0) <= 1
