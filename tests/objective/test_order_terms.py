"""The order of segments, hard and soft, in value, gradient and count against a naive float64 loop."""

import math
from typing import Any

import numpy as np
import pytest
import tiny
import torch

from distill.config import settings as conf
from distill.data.batch import Batch, Labels
from distill.models.language_model import NO_OUTPUTS, Outputs
from distill.objective.terms.soft_sop import SoftSop
from distill.objective.terms.sop import Sop
from distill.teacher.output import TeacherOutput

TARGETS = [0, 1, 1, 0, 1]


def batch() -> Batch:
    ids = torch.zeros(len(TARGETS), 4, dtype=torch.long)
    nothing = torch.zeros(0, dtype=torch.long)
    labels = {"mlm": Labels(nothing, nothing), "sop": Labels(torch.arange(len(TARGETS)), torch.tensor(TARGETS))}
    return Batch({"input_ids": ids}, None, labels, None, np.arange(len(TARGETS)))


def logits(seed: int) -> torch.Tensor:
    return torch.randn(len(TARGETS), 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def outputs(values: torch.Tensor) -> Outputs:
    return Outputs(None, {}, extra={"sop": values})


def naive(student: list[list[float]], teacher: list[list[float]] | None, temperature: float) -> float:
    def probabilities(row: list[float], t: float) -> list[float]:
        exps = [math.exp(value / t) for value in row]
        return [value / sum(exps) for value in exps]

    total = 0.0
    for number, row in enumerate(student):
        if teacher is None:
            total -= math.log(probabilities(row, 1.0)[TARGETS[number]])
        else:
            p, q = probabilities(teacher[number], temperature), probabilities(row, temperature)
            total += temperature**2 * sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
    return total


@pytest.mark.parametrize("temperature", [None, 1.0, 2.0])
def test_value_and_gradient(temperature: float | None) -> None:
    student, teacher = logits(0).requires_grad_(), logits(1)
    soft = temperature is not None
    term = SoftSop(temperature) if temperature is not None else Sop()
    output = TeacherOutput(None, outputs(teacher) if soft else NO_OUTPUTS)
    loss = term.loss_sum(outputs(student), output, batch())
    rows = student.tolist()
    expected = naive(rows, teacher.tolist() if soft else None, temperature or 1.0)
    assert loss.item() == pytest.approx(expected, rel=1e-9)
    assert term.count(batch()) == len(TARGETS)
    (gradient,) = torch.autograd.grad(loss, student)
    for row, column in np.ndindex(*student.shape):
        ends = []
        for step in (1e-5, -1e-5):
            moved = [list(values) for values in rows]
            moved[row][column] += step
            ends.append(naive(moved, teacher.tolist() if soft else None, temperature or 1.0))
        assert gradient[row, column].item() == pytest.approx((ends[0] - ends[1]) / 2e-5, abs=1e-6)


def test_they_count_rows_over_the_whole_window(tokenizer: Any) -> None:
    settings = tiny.only(mlm=1.0, sop={"weight": 1.0})
    assert isinstance(settings, conf.ObjectiveConfig)
    objective = tiny.make_objective(settings, None, None)
    counts = objective.by_name(objective.count([batch(), batch()]).tolist())
    assert counts["sop"] == 2 * len(TARGETS)
