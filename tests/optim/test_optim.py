"""The optimizer's groups, clipping, and optimizers that no run can use."""

import math
from typing import Any

import pytest
import torch
from tiny import make_model, optimizer_config
from torch import nn

from distill.config.settings import OptimizerConfig
from distill.optim.optimizer_state import optimizer_state, restore_optimizer
from distill.optim.updates import bound_of_rank, build, clip_gradients, peak_lr, set_learning_rate, try_out
from distill.runtime.errors import SettingError


@pytest.mark.parametrize("family", ["bert", "distilbert", "roberta", "modernbert", "albert"])
def test_matrices_decay_and_nothing_else(family: str) -> None:
    model = make_model(family, 2)
    optimizer = build(model, optimizer_config({"weight_decay": 0.3}))
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert len(decay) == sum(len(group["params"]) for group in optimizer.param_groups), "a parameter stands there twice"
    assert decay.keys() == {id(p) for p in model.parameters()}
    norms = {id(p) for m in model.modules() if isinstance(m, nn.LayerNorm) for p in m.parameters()}
    assert norms
    for name, parameter in model.named_parameters():
        plain = id(parameter) in norms or name.endswith("bias")
        assert decay[id(parameter)] == (0.0 if plain else 0.3), name
    assert [group.get("adapt", True) for group in optimizer.param_groups] == [True, False]


def test_the_learning_rate_is_set_in_every_group() -> None:
    optimizer = build(nn.Linear(2, 2), optimizer_config({"lr": 0.1}))
    set_learning_rate(optimizer, 0.05)
    assert [group["lr"] for group in optimizer.param_groups] == [0.05, 0.05]


def test_groups_with_rates_of_their_own_keep_their_ratios() -> None:
    """Also where a resumed run has restored them."""
    settings = optimizer_config({"_target_": "own_parts.layerwise", "lr": 0.1, "decay": 0.25})

    def rates(optimizer: torch.optim.Optimizer, lr: float) -> list[float]:
        set_learning_rate(optimizer, lr)
        return [group["lr"] for group in optimizer.param_groups]

    model = nn.Linear(2, 2)
    optimizer = build(model, settings)
    assert rates(optimizer, 0.05) == [0.05, 0.05 * 0.25] and rates(optimizer, 0.02) == [0.02, 0.02 * 0.25]
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    resumed = build(model, settings)
    restore_optimizer(model, resumed, *optimizer_state(model, optimizer))
    assert rates(resumed, 0.04) == [0.04, 0.04 * 0.25]


def test_one_rate_of_all_groups_is_that_of_the_settings() -> None:
    """Checkpoints hold then what they always held."""
    model = nn.Linear(2, 2)
    optimizer = build(model, optimizer_config({"_target_": "own_parts.layerwise", "lr": 0.1, "decay": 1.0}))
    assert not any("lr_ratio" in name for name in optimizer_state(model, optimizer)[1])


def test_frozen_parameters_are_left_out() -> None:
    model = nn.Linear(3, 2)
    model.weight.requires_grad_(False)
    assert [p.shape for g in build(model, optimizer_config({})).param_groups for p in g["params"]] == [(2,)]


def with_gradients(values: list[list[float]]) -> nn.ParameterList:
    parameters = nn.ParameterList([nn.Parameter(torch.zeros(len(value))) for value in values])
    for parameter, value in zip(parameters, values, strict=True):
        parameter.grad = torch.tensor(value)
    return parameters


def test_clip_is_of_the_whole_gradient() -> None:
    model = with_gradients([[3.0, 0.0], [4.0], [12.0]])
    assert float(clip_gradients(model, 100.0)) == float(clip_gradients(model, None)) == pytest.approx(13.0)
    assert [p.grad.tolist() for p in model] == [[3.0, 0.0], [4.0], [12.0]]  # type: ignore[union-attr]
    assert float(clip_gradients(model, 6.5)) == pytest.approx(13.0), "the norm before clipping"
    assert [p.grad.tolist() for p in model] == [[pytest.approx(1.5), 0.0], [pytest.approx(2.0)], [pytest.approx(6.0)]]  # type: ignore[union-attr]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_clip_tells_of_gradients_that_are_not_finite(bad: float) -> None:
    assert not math.isfinite(float(clip_gradients(with_gradients([[1.0], [bad]]), 5.0)))


@pytest.mark.parametrize(("how", "growth"), [("none", 1.0), ("linear", 4.0), ("sqrt", 2.0)])
def test_the_learning_rate_grows_with_the_rows_of_a_step(how: str, growth: float) -> None:
    base = None if how == "none" else 64
    assert peak_lr(OptimizerConfig(lr=0.3, scale_lr=how, base_batch=base), 256) == pytest.approx(0.3 * growth)


def test_the_bound_of_a_rank_is_its_part_of_the_whole() -> None:
    assert bound_of_rank(OptimizerConfig(clip=1.0, clip_each_rank=True), 4) == 0.25
    assert bound_of_rank(OptimizerConfig(clip=1.0, clip_each_rank=True), 1) is None
    assert bound_of_rank(OptimizerConfig(clip=1.0), 4) is None


def test_an_optimizer_of_torch_needs_no_code() -> None:
    settings = {"_target_": "torch.optim.SGD", "lr": 0.1, "momentum": 0.9, "weight_decay": 0.3}
    optimizer = build(nn.Linear(2, 2), optimizer_config(settings))
    found = [(group["lr"], group["momentum"], group["weight_decay"]) for group in optimizer.param_groups]
    assert isinstance(optimizer, torch.optim.SGD) and found == [(0.1, 0.9, 0.3), (0.1, 0.9, 0.0)]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"kind": "magic"}, ["optimizer.kind=magic", "adamw", "optimizer._target_"]),
        ({"beta": 0.9}, ["optimizer.beta: no setting", "betas"]),
        ({"betas": "wide"}, ["optimizer.betas=wide: should be a valid tuple"]),
        ({"_target_": "own_parts.Nothing"}, ["optimizer._target_=own_parts.Nothing", "imported"]),
        ({"_target_": "own_parts.Counter", "speed": 1}, ["optimizer.speed: no setting", "own_parts.Counter"]),
        ({"_target_": "own_parts.Counter", "params": 1}, ["optimizer.params: no setting"]),
        ({"_target_": "pathlib.PurePath"}, ["optimizer._target_=pathlib.PurePath", "torch.optim.Optimizer"]),
        ({"_target_": "torch.optim.SGD", "momentum": -1}, ["optimizer: Invalid momentum value: -1"]),
        ({"_target_": "torch.optim.LBFGS"}, ["optimizer: LBFGS", "parameter groups"]),
        ({"_target_": "own_parts.NoRate"}, ["own_parts.NoRate", "no lr"]),
        ({"_target_": "own_parts.Needy"}, ["own_parts.Needy fails in a step", "closure"]),
        ({"_target_": "own_parts.Hoarder"}, ["Hoarder keeps a list as 'history'", "tensors and numbers"]),
        ({"_target_": "own_parts.Central"}, ["Central keeps 'total' in its state", "no parameter"]),
    ],
)  # fmt: skip
def test_optimizers_that_no_run_can_use_are_refused(settings: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(SettingError) as error:
        optimizer_state(*try_out(optimizer_config(settings)))
    text = str(error.value)
    assert "\n" not in text and all(word in text for word in words), text
