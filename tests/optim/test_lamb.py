"""LAMB: several steps against a plain loop in float64, what is left out of it, and resuming."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny import Fit, assert_close, make_model, only, optimizer_config, weights_of
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


def stepped(optimizer: torch.optim.Optimizer, parameters: Any) -> list[list[torch.Tensor]]:
    """Take four steps; the gradients by step and parameter."""
    random = torch.Generator().manual_seed(4)
    gradients = [[torch.randn(s, generator=random) for s in SHAPES] for _ in RATES]
    for of_step, lr in zip(gradients, RATES, strict=True):
        for parameter, gradient in zip(parameters, of_step, strict=True):
            parameter.grad = gradient.to(parameter.device)
        optim.set_learning_rate(optimizer, lr)
        optimizer.step()
    return gradients


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


either = pytest.mark.parametrize("cls", [Lamb, Together], ids=["pieces", "together"])


@either
@pytest.mark.parametrize("correct", [False, True])
@pytest.mark.parametrize("decay", [0.3, 0.0])
def test_steps_are_those_of_the_formula(
    cls: type[Lamb], correct: bool, decay: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Matrices are adapted and decay, vectors neither; pieces that do not divide a parameter change nothing."""
    monkeypatch.setattr(lamb, "PIECE", 16)
    before, parameters = make_parameters(), make_parameters()
    settings = {"betas": [0.9, 0.99], "weight_decay": decay, "bias_correction": correct}
    target = {"_target_": f"{cls.__module__}.{cls.__name__}"}
    gradients = stepped(optim.build(parameters, optimizer_config(target | settings)), parameters)
    for i, (start, found) in enumerate(zip(before, parameters, strict=True)):
        adapts = start.ndim > 1
        wanted = definition(start, [of_step[i] for of_step in gradients], adapts, decay * adapts, correct)
        torch.testing.assert_close(found.detach().double(), wanted, rtol=2e-6, atol=2e-6)


@either
def test_a_norm_of_zero_leaves_the_step_as_it_is(cls: type[Lamb]) -> None:
    """Else a parameter that starts at zero would stay there; one without a gradient is left alone."""
    starts = nn.ParameterList([nn.Parameter(torch.zeros(2, 3)), *(nn.Parameter(torch.ones(2, 3)) for _ in range(2))])
    starts[0].grad, starts[1].grad = torch.ones(2, 3), torch.zeros(2, 3)
    cls(starts, lr=0.5, betas=(0.9, 0.999), weight_decay=0.0).step()
    expected = -0.5 * 0.1 / (math.sqrt(0.001) + 1e-6)
    torch.testing.assert_close(starts[0].detach(), torch.full((2, 3), expected))
    assert all(torch.equal(start.detach(), torch.ones(2, 3)) for start in starts[1:])


def test_going_on_from_a_checkpoint_is_bitwise_the_same(tmp_path: Path, tokenizer: Any, rows: np.ndarray) -> None:
    """With the correction of the bias, whose number of steps a checkpoint could forget."""

    def fit(seed: int) -> Fit:
        settings = TrainConfig(batch_size=4, accumulate=2, epochs=2, save_every=1, keep=9)
        own = optimizer_config({"kind": "lamb", "lr": 0.01, "bias_correction": True, "clip": 1.0})
        student = make_model("albert", 2, seed=seed, dropout=0.2).train()
        return Fit(tmp_path, tokenizer, rows, None, student, only(mlm=2.0), settings, optimizer_settings=own)

    whole, other = fit(5), fit(99)
    whole.run()
    other.resume(tmp_path / "step-00000003")
    other.run()
    assert whole.losses()[3:] == other.losses() and len(other.logs) == 3
    assert_close(weights_of(other.student), weights_of(whole.student), rtol=0, atol=0)


def test_scattered_parameters_are_refused() -> None:
    with pytest.raises(SettingError, match=r"^optimizer.*contiguous"):
        optim.build(nn.ParameterList([nn.Parameter(torch.ones(3, 2).t())]), optimizer_config({"kind": "lamb"}))


@pytest.mark.gpu
def test_a_gpu_steps_as_a_cpu_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lamb, "CHUNK", 130)
    here, there = make_parameters(), make_parameters("cuda")
    for parameters in (here, there):
        stepped(optim.build(parameters, optimizer_config({"kind": "lamb"})), parameters)
    for one, other in zip(here, there, strict=True):
        torch.testing.assert_close(one.detach(), other.detach().cpu(), rtol=1e-5, atol=1e-6)
