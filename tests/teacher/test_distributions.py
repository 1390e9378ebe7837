"""Every form of a teacher's distribution gives the soft targets of `losses`, in value and gradient, and its rows."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from distill.models.language_model import Head
from distill.objective import losses
from distill.teacher.distributions import (
    Logits,
    Mixture,
    Samples,
    Single,
    StudentRows,
    TopK,
    mixed_logits,
    top_k_log_probs,
)

ROWS, VOCAB, TEMPERATURE = 5, 17, 1.7
CUTOFF = 0.05


def numbers(*sizes: int, seed: int) -> Tensor:
    return 2 * torch.randn(*sizes, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


VALUES, BIAS = numbers(ROWS, VOCAB, seed=1), numbers(VOCAB, seed=2)
TOP: TopK = top_k_log_probs(VALUES, 4, TEMPERATURE)
SAMPLES = Samples(
    torch.tensor([[3, 9, 3]] * ROWS, dtype=torch.int32), numbers(ROWS, 3, seed=3).abs(), -numbers(ROWS, 1, seed=4).abs()
)
# By name: a form, its cut-off, and the formula of `losses` for the student's logits.
FORMS: dict[str, tuple[Single, float, Callable[[Tensor], Tensor]]] = {
    "logits": (Logits(VALUES, BIAS), 0.0, lambda z: losses.soft(z, VALUES + BIAS, TEMPERATURE)),
    "cut": (Logits(VALUES), CUTOFF, lambda z: losses.soft(z, VALUES, TEMPERATURE, CUTOFF)),
    "largest": (TOP, 0.0, lambda z: losses.soft_topk(z, *TOP, TEMPERATURE)),
    "samples": (SAMPLES, 0.0, lambda z: losses.soft_sampled(z, *SAMPLES, TEMPERATURE)),
}


def student_rows(logits: Tensor, teacher: Single) -> StudentRows:
    z = logits / TEMPERATURE
    top = z.amax(-1, keepdim=True)
    # Where a form reads no exponentials it may be given anything.
    v = (z - top).exp() if teacher.reads_exponentials else torch.full_like(z, torch.nan)
    return StudentRows(z, top, v, TEMPERATURE)


@pytest.mark.parametrize("form", FORMS)
def test_soft_targets_are_those_of_the_formulas(form: str) -> None:
    teacher, cutoff, formula = FORMS[form]
    logits = numbers(ROWS, VOCAB, seed=5).requires_grad_()
    want = formula(logits)
    (gradient,) = torch.autograd.grad((0.3 * want).sum(), logits)
    student = student_rows(logits.detach(), teacher)
    loss, by_hand = teacher.soft_targets(student, torch.tensor(0.3 * TEMPERATURE, dtype=torch.float64), cutoff)
    torch.testing.assert_close(TEMPERATURE**2 * loss[:, 0], want.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(by_hand, gradient, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("rows", [slice(1, 3), torch.tensor([4, 0])], ids=["slice", "numbers"])
@pytest.mark.parametrize("form", FORMS)
def test_some_of_the_rows(form: str, rows: Tensor | slice) -> None:
    teacher, cutoff, _ = FORMS[form]
    logits, weight = numbers(ROWS, VOCAB, seed=5), torch.ones((), dtype=torch.float64)
    whole = teacher.soft_targets(student_rows(logits, teacher), weight, cutoff)
    part = teacher.rows(rows)
    some = part.soft_targets(student_rows(logits[rows], part), weight, cutoff)
    torch.testing.assert_close(some, tuple(values[rows] for values in whole), rtol=0, atol=0)


def test_logits_of_several_teachers_are_one_distribution() -> None:
    other = Logits(numbers(ROWS, VOCAB, seed=6))
    mixture = Mixture((Head(VALUES, BIAS), Head(VALUES, BIAS)), (0.25, 0.75), TEMPERATURE)
    ((weight, mixed),) = mixture.combined([Logits(VALUES, BIAS), other], torch.float64)
    assert weight == 1.0 and isinstance(mixed, Logits) and mixed.bias is None
    want = mixed_logits([VALUES + BIAS, other.values], (0.25, 0.75), TEMPERATURE)
    torch.testing.assert_close(mixed.values, want, rtol=0, atol=0)


def test_the_losses_of_teachers_known_by_some_entries_are_averaged() -> None:
    members = (Logits(VALUES), TOP)
    mixture = Mixture(members, (0.25, 0.75))
    assert mixture.combined(members, torch.float64) == [(0.25, members[0]), (0.75, members[1])]


def test_one_teacher_and_none_are_mixtures_too() -> None:
    assert Mixture.of(TOP) == Mixture((TOP,), (1.0,))
    assert Mixture.of(TOP).combined([TOP], torch.float64) == [(1.0, TOP)]
    assert Mixture.of(None).combined([], torch.float64) == [(1.0, None)]
    mixture = Mixture((TOP, SAMPLES), (0.5, 0.5), TEMPERATURE)
    assert Mixture.of(mixture) is mixture
