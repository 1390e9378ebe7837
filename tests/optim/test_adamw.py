"""AdamW: its settings reach torch's, one step is that of the paper, and values out of range are refused by name."""

from typing import Any

import pytest
import torch
from tiny import optimizer_config
from torch import nn

from distill.optim.updates import build
from distill.runtime.errors import SettingError


def test_settings_reach_adamw() -> None:
    settings = {"lr": 0.1, "betas": [0.8, 0.7], "eps": 1e-3, "weight_decay": 0.2}
    optimizer = build(nn.Linear(2, 2), optimizer_config(settings))
    assert isinstance(optimizer, torch.optim.AdamW)
    for group, decay in zip(optimizer.param_groups, (0.2, 0.0), strict=True):
        assert (group["lr"], group["betas"], group["eps"], group["weight_decay"]) == (0.1, (0.8, 0.7), 1e-3, decay)
        assert group["fused"]


def test_it_is_the_default() -> None:
    group = build(nn.Linear(2, 2), optimizer_config({})).param_groups[0]
    assert (group["lr"], group["betas"], group["eps"], group["weight_decay"]) == (5e-4, (0.9, 0.98), 1e-6, 0.01)


def test_one_step_is_adamw_by_hand() -> None:
    model = nn.Linear(2, 1)
    settings = {"lr": 0.1, "betas": [0.9, 0.98], "eps": 1e-6, "weight_decay": 0.01}
    optimizer = build(model, optimizer_config(settings))
    weight, bias = model.weight.detach().clone(), model.bias.detach().clone()
    model(torch.tensor([[1.0, -2.0]])).sum().backward()
    optimizer.step()
    # After bias correction the first step is lr * sign(gradient).
    direction = torch.tensor([[1.0, -2.0]]) / (torch.tensor([[1.0, 2.0]]) + 1e-6)
    torch.testing.assert_close(model.weight.detach(), weight * (1 - 0.1 * 0.01) - 0.1 * direction)
    torch.testing.assert_close(model.bias.detach(), bias - 0.1 / (1 + 1e-6))


@pytest.mark.parametrize(
    ("name", "value"),
    [("betas", [0.9, 1.0]), ("betas", [0.9]), ("eps", 0.0), ("eps", float("nan")), ("weight_decay", -0.1)],
)
def test_values_out_of_range_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(SettingError, match=f"^optimizer.{name}[=:].*{value if name != 'betas' else ''}"):
        build(nn.Linear(2, 2), optimizer_config({name: value}))
