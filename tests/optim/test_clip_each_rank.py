"""Clipping before the exchange: two ranks against a plain computation in float64."""

import math
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from distributed import run_ranks

from distill.config.settings import BackendConfig, OptimizerConfig, TrainConfig
from distill.distributed import join_ranks
from distill.optim.schedules.constant import Constant

RATE, BOUND, STEPS = 0.05, 6.2, 3
SETTINGS = TrainConfig(batch_size=2, accumulate=2, epochs=None, steps=STEPS)
ROWS = tiny.make_rows(20, shortest=5)  # 8 a step: the third one has 4


def make_student() -> Any:
    return tiny.make_model("distilbert", 2, seed=5).train()


def trained(folder: Path, each_rank: bool) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Weights after three steps of SGD on one rank, and the norms that were logged."""
    torch.set_num_threads(1)
    with join_ranks(BackendConfig(name="ddp", device="cpu", threads=1, timeout=60.0)) as ranks:
        fit = tiny.Fit(
            folder, tiny.make_tokenizer(), ROWS, student=make_student(), objective=tiny.only(mlm=1.0),
            settings=SETTINGS, schedule=Constant(warmup=0.0), ranks=ranks,
            optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=RATE),
            optimizer_settings=OptimizerConfig(lr=RATE, clip=BOUND, clip_each_rank=each_rank),
        )  # fmt: skip
        fit.run()
        return tiny.weights_of(fit.student), [line["grad_norm"] for line in fit.logs]


def norm_of(gradients: list[torch.Tensor]) -> float:
    return math.sqrt(sum(float(x) ** 2 for gradient in gradients for x in gradient.reshape(-1)))


def definition() -> tuple[dict[str, torch.Tensor], list[float], list[float]]:
    """Weights, the norms of the steps after the exchange, and those of the ranks before they clip."""
    student = make_student().double()
    objective = tiny.make_objective(tiny.only(mlm=1.0), student, None)
    parameters, after, before = list(student.parameters()), [], []
    masks = tiny.make_masks(tiny.make_tokenizer(), ROWS)
    for step in range(STEPS):
        windows = [tiny.make_batches(ROWS, masks, 2, 2, 0, rank=rank, size=2).window(step) for rank in range(2)]
        counts = sum(objective.count(window) for window in windows)
        total = [torch.zeros_like(parameter) for parameter in parameters]
        for window in windows:
            loss, _ = tiny.loss_of(objective, student, None, window, counts)
            own = torch.autograd.grad(loss, parameters, materialize_grads=True)
            before.append(norm_of(list(own)))
            factor = min(1.0, BOUND / 2 / before[-1])
            total = [sum_ + factor * gradient for sum_, gradient in zip(total, own, strict=True)]
        after.append(norm_of(total))
        with torch.no_grad():
            for parameter, gradient in zip(parameters, total, strict=True):
                parameter -= RATE * gradient
    return tiny.weights_of(student), after, before


def test_ranks_clip_their_own_gradients(tmp_path: Path) -> None:
    weights, after, before = definition()
    assert min(before) < BOUND / 2 < max(before), "some ranks clip and some do not"
    for of_rank, norms in run_ranks(2, tmp_path / "each", trained, tmp_path / "runs", True):
        tiny.assert_close(of_rank, {name: value.float() for name, value in weights.items()}, rtol=1e-5, atol=1e-6)
        assert norms == pytest.approx(after, rel=1e-5) and max(norms) <= BOUND
    (whole, _), _ = run_ranks(2, tmp_path / "whole", trained, tmp_path / "others", False)
    with pytest.raises(AssertionError):
        tiny.assert_close(whole, {name: value.float() for name, value in weights.items()}, rtol=1e-5, atol=1e-6)
