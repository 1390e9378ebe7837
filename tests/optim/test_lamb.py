"""LAMB: several steps against a plain loop in float64, what is left out of it, resume, and values that are refused."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny import Fit, assert_close, make_model, objective_config, optimizer_config, weights_of
from torch import nn

from distill.config.settings import TrainConfig
from distill.optim import updates as optim
from distill.optim.optimizers import lamb
from distill.optim.optimizers.lamb import Lamb
from distill.runtime.errors import SettingError

RATES = (0.1, 0.03, 0.2, 0.1)  # of four steps
SHAPES = ((7, 11), (40, 3), (5,), (1, 1))


class Together(Lamb):
    """With the calls of a GPU, which a CPU can do as well."""

    def _step_in_pieces(self, group: dict[str, Any], weight: torch.Tensor) -> None:
        self._step_together(group, [weight])


def make_parameters(device: str = "cpu") -> nn.ParameterList:
    random = torch.Generator().manual_seed(3)
    return nn.ParameterList([nn.Parameter(torch.randn(s, generator=random).to(device)) for s in SHAPES])


def make_gradients() -> list[list[torch.Tensor]]:
    """By step and parameter."""
    random = torch.Generator().manual_seed(4)
    return [[torch.randn(s, generator=random) for s in SHAPES] for _ in RATES]


def definition(
    weight: torch.Tensor, gradients: list[torch.Tensor], adapt: bool, decay: float, correct: bool
) -> torch.Tensor:
    """A parameter after the steps of the published formula, number by number in float64."""
    w = weight.detach().double().reshape(-1).tolist()
    m, v = [0.0] * len(w), [0.0] * len(w)
    for number, (gradient, lr) in enumerate(zip(gradients, RATES, strict=True), 1):
        update = []
        for i, g in enumerate(gradient.double().reshape(-1).tolist()):
            m[i] = 0.9 * m[i] + 0.1 * g
            v[i] = 0.99 * v[i] + 0.01 * g * g
            m_hat, v_hat = (m[i] / (1 - 0.9**number), v[i] / (1 - 0.99**number)) if correct else (m[i], v[i])
            update.append(m_hat / (math.sqrt(v_hat) + 1e-6) + decay * w[i])
        length, of_update = (math.sqrt(sum(x * x for x in values)) for values in (w, update))
        ratio = length / of_update if adapt and length > 0 and of_update > 0 else 1.0
        w = [x - lr * ratio * u for x, u in zip(w, update, strict=True)]
    return torch.tensor(w, dtype=torch.float64).view_as(weight)


def stepped(optimizer: torch.optim.Optimizer, parameters: Any, gradients: list[list[torch.Tensor]]) -> None:
    for of_step, lr in zip(gradients, RATES, strict=True):
        for parameter, gradient in zip(parameters, of_step, strict=True):
            parameter.grad = gradient.to(parameter.device)
        optim.set_learning_rate(optimizer, lr)
        optimizer.step()


@pytest.mark.parametrize("cls", [Lamb, Together], ids=["pieces", "together"])
@pytest.mark.parametrize("correct", [False, True])
@pytest.mark.parametrize("decay", [0.3, 0.0])
def test_steps_are_those_of_the_formula(
    cls: type[Lamb], correct: bool, decay: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Matrices are adapted and decay, vectors neither; pieces that do not divide a parameter change nothing."""
    monkeypatch.setattr(lamb, "PIECE", 16)
    parameters, gradients = make_parameters(), make_gradients()
    wanted = [
        definition(p, [of_step[i] for of_step in gradients], p.ndim > 1, decay if p.ndim > 1 else 0.0, correct)
        for i, p in enumerate(parameters)
    ]
    settings = {"betas": [0.9, 0.99], "weight_decay": decay, "bias_correction": correct}
    target = {"_target_": f"{cls.__module__}.{cls.__name__}"}
    stepped(optim.build(parameters, optimizer_config(target | settings)), parameters, gradients)
    for parameter, value in zip(parameters, wanted, strict=True):
        torch.testing.assert_close(parameter.detach().double(), value, rtol=2e-6, atol=2e-6)


def test_it_is_an_option_and_its_defaults_are_alberts() -> None:
    optimizer = optim.build(make_parameters(), optimizer_config({"kind": "lamb", "lr": 0.1}))
    matrices, vectors = optimizer.param_groups
    assert isinstance(optimizer, Lamb) and matrices["betas"] == (0.9, 0.999) and matrices["eps"] == 1e-6
    assert (matrices["weight_decay"], matrices["adapt"], matrices["bias_correction"]) == (0.01, True, False)
    assert (vectors["weight_decay"], vectors["adapt"]) == (0.0, False)


@pytest.mark.parametrize("cls", [Lamb, Together], ids=["pieces", "together"])
def test_a_norm_of_zero_leaves_the_step_as_it_is(cls: type[Lamb]) -> None:
    """Else a parameter that starts at zero would stay there, and one without a gradient would be divided by zero."""
    starts = nn.ParameterList([nn.Parameter(torch.zeros(2, 3)), nn.Parameter(torch.ones(2, 3))])
    starts[0].grad, starts[1].grad = torch.ones(2, 3), torch.zeros(2, 3)
    cls(starts, lr=0.5, betas=(0.9, 0.999), weight_decay=0.0).step()
    expected = -0.5 * 0.1 / (math.sqrt(0.001) + 1e-6)
    torch.testing.assert_close(starts[0].detach(), torch.full((2, 3), expected))
    assert torch.equal(starts[1].detach(), torch.ones(2, 3))


def test_a_parameter_without_a_gradient_is_left_alone() -> None:
    parameters = make_parameters()
    before = [parameter.detach().clone() for parameter in parameters]
    parameters[0].grad = torch.ones(7, 11)
    Lamb(parameters, lr=0.5).step()
    assert [torch.equal(a, b) for a, b in zip(parameters, before, strict=True)] == [False, True, True, True]


def test_large_lists_are_cut_into_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lamb, "CHUNK", 130)
    assert [[tuple(each.shape) for each in some] for some in lamb._chunks(list(make_parameters()))] == [
        [(7, 11)],
        [(40, 3), (5,), (1, 1)],
    ]


def make_fit(folder: Path, tokenizer: Any, rows: np.ndarray, seed: int = 5) -> Fit:
    return Fit(
        folder, tokenizer, rows, None, make_model("albert", 2, seed=seed, dropout=0.2).train(),
        objective_config(soft=0.0, cosine=0.0), TrainConfig(batch_size=4, accumulate=2, epochs=2, save_every=1, keep=9),
        optimizer_settings=optimizer_config({"kind": "lamb", "lr": 0.01, "bias_correction": True, "clip": 1.0}),
    )  # fmt: skip


def test_going_on_from_a_checkpoint_is_bitwise_the_same(tmp_path: Path, tokenizer: Any, rows: np.ndarray) -> None:
    """With the correction of the bias, whose number of steps a checkpoint could forget."""
    whole, other = make_fit(tmp_path, tokenizer, rows), make_fit(tmp_path, tokenizer, rows, seed=99)
    whole.run()
    other.resume(tmp_path / "step-00000003")
    other.run()
    assert whole.losses()[3:] == other.losses() and len(other.logs) == 3
    assert_close(weights_of(other.student), weights_of(whole.student), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("betas", [0.9, 1.0]),
        ("betas", [0.9]),
        ("eps", 0.0),
        ("eps", float("inf")),
        ("weight_decay", -0.1),
        ("bias_correction", "perhaps"),
        ("power", 2),
    ],
)
def test_values_that_cannot_be_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(SettingError, match=f"^optimizer.{name}[=: ].*"):
        optim.build(nn.Linear(2, 2), optimizer_config({"kind": "lamb", name: value}))


def test_scattered_parameters_are_refused() -> None:
    model = nn.ParameterList([nn.Parameter(torch.ones(3, 2).t())])
    with pytest.raises(SettingError, match=r"^optimizer.*contiguous"):
        optim.build(model, optimizer_config({"kind": "lamb"}))


@pytest.mark.gpu
def test_a_gpu_steps_as_a_cpu_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lamb, "CHUNK", 130)
    here, there = make_parameters(), make_parameters("cuda")
    for parameters in (here, there):
        stepped(optim.build(parameters, optimizer_config({"kind": "lamb"})), parameters, make_gradients())
    for one, other in zip(here, there, strict=True):
        torch.testing.assert_close(one.detach(), other.detach().cpu(), rtol=1e-5, atol=1e-6)
