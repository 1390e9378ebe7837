"""Losses of fine-tuning, with labels and with a teacher, in value and gradient against a naive float64 loop."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tiny import named_terms

from distill.data.batch import PADDING, Batch, Labels
from distill.models.language_model import NO_OUTPUTS, Outputs
from distill.objective.terms.classes import Classes
from distill.objective.terms.soft_classes import SoftClasses
from distill.objective.terms.soft_sop import SoftSop
from distill.objective.terms.soft_span import SoftSpan
from distill.objective.terms.span import Span
from distill.runtime.errors import SettingError
from distill.teacher.output import TeacherOutput

ROWS, LENGTH = 4, 7
VALID = [7, 5, 3, 6]  # positions of each row that are text
STARTS, ENDS, CLASSES, VALUES = [2, 0, 1, 5], [4, 0, 2, 5], [0, 2, 1, 2], [0.5, -1.0, 2.0, 0.25]


def batch(labels: dict[str, torch.Tensor]) -> Batch:
    rows = torch.arange(ROWS)
    documents = torch.tensor([[0] * valid + [PADDING] * (LENGTH - valid) for valid in VALID])
    found = {name: Labels(rows, targets) for name, targets in labels.items()}
    ids = torch.zeros(ROWS, LENGTH, dtype=torch.long)
    return Batch({"input_ids": ids}, documents, found, None, np.arange(ROWS))


def log_softmax(values: list[float]) -> list[float]:
    total = math.log(sum(math.exp(value) for value in values))
    return [value - total for value in values]


def kl(teacher: list[float], student: list[float], temperature: float) -> float:
    p = log_softmax([value / temperature for value in teacher])
    q = log_softmax([value / temperature for value in student])
    return temperature**2 * sum(math.exp(a) * (a - b) for a, b in zip(p, q, strict=True))


def column(values: Any, row: int, end: int) -> list[float]:
    """The logits of one end of a row, at its text alone."""
    return [float(values[row][position][end]) for position in range(VALID[row])]


def spans(student: Any, teacher: Any) -> float:
    both = [(row, end, target) for row in range(ROWS) for end, target in enumerate((STARTS[row], ENDS[row]))]
    return sum(-log_softmax(column(student, row, end))[target] for row, end, target in both) / 2


def soft_spans(student: Any, teacher: Any) -> float:
    pairs = [(column(teacher, row, end), column(student, row, end)) for row in range(ROWS) for end in (0, 1)]
    return sum(kl(one, other, 2.0) for one, other in pairs) / 2


def classes(student: Any, teacher: Any) -> float:
    return sum(-log_softmax([float(each) for each in student[row]])[CLASSES[row]] for row in range(ROWS))


def soft_classes(student: Any, teacher: Any) -> float:
    return sum(kl([float(v) for v in teacher[row]], [float(v) for v in student[row]], 2.0) for row in range(ROWS))


def values(student: Any, teacher: Any) -> float:
    return sum((float(student[row][0]) - VALUES[row]) ** 2 for row in range(ROWS))


def soft_values(student: Any, teacher: Any) -> float:
    return sum((float(student[row][0]) - float(teacher[row][0])) ** 2 for row in range(ROWS))


SPAN_LABELS = {"span_start": torch.tensor(STARTS), "span_end": torch.tensor(ENDS)}
CASES: dict[str, tuple[Any, str, tuple[int, ...], dict[str, torch.Tensor], Callable[[Any, Any], float]]] = {
    "span": (Span(), "span", (ROWS, LENGTH, 2), SPAN_LABELS, spans),
    "soft_span": (SoftSpan(2.0), "span", (ROWS, LENGTH, 2), SPAN_LABELS, soft_spans),
    "classes": (Classes(), "class", (ROWS, 3), {"class": torch.tensor(CLASSES)}, classes),
    "soft_classes": (SoftClasses(2.0), "class", (ROWS, 3), {"class": torch.tensor(CLASSES)}, soft_classes),
    "values": (Classes(), "class", (ROWS, 1), {"class": torch.tensor(VALUES)}, values),
    "soft_values": (SoftClasses(2.0), "class", (ROWS, 1), {"class": torch.tensor(VALUES)}, soft_values),
}


@pytest.mark.parametrize("name", CASES)
def test_value_gradient_and_count(name: str) -> None:
    term, head, shape, labels, naive = CASES[name]
    student, teacher = (
        torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) for seed in (0, 1)
    )
    student.requires_grad_()
    output = TeacherOutput(None, Outputs(None, {}, extra={head: teacher}) if term.needs_teacher else NO_OUTPUTS)
    loss = term.loss_sum(Outputs(None, {}, extra={head: student}), output, batch(labels))
    assert loss.item() == pytest.approx(naive(student.tolist(), teacher.tolist()), rel=1e-9)
    assert term.count(batch(labels)) == ROWS
    (gradient,) = torch.autograd.grad(loss, student)
    for index in np.ndindex(*shape):
        moved = student.detach().clone()
        ends = []
        for step in (1e-5, -1e-5):
            moved[index] = student.detach()[index] + step
            ends.append(naive(moved.tolist(), teacher.tolist()))
        assert gradient[index].item() == pytest.approx((ends[0] - ends[1]) / 2e-5, abs=1e-6)
    if head == "span":
        assert gradient[2, VALID[2] :].abs().max() == 0, "padding has no gradient"


@pytest.mark.parametrize("make", [SoftClasses, SoftSop, SoftSpan])
def test_temperatures_that_divide_no_logits_are_refused(make: Callable[[float], Any]) -> None:
    for temperature in (0.0, -2.0, math.inf, math.nan):
        with pytest.raises(ValueError, match=f"^temperature={temperature} must be above 0 and finite$"):
            make(temperature)
    name = make.__name__.replace("Soft", "soft_").lower()
    with pytest.raises(SettingError, match=rf"^objective\.{name}\.temperature=-2\.0: .* from 0\.01 up to"):
        named_terms(**{name: {"weight": 1.0, "temperature": -2}})
