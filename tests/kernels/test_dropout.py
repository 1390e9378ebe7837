"""Dropout on the CPU: zeros at the wished rate, independent, and no other weights."""

import pytest
import tiny
import torch

from distill.kernels.dropout import Dropout, draw_less, factors
from distill.models.load import hidden_states


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("p", [0.1, 0.5, 0.93])
def test_values_are_dropped_at_random_and_keep_their_mean(p: float, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    found = factors(torch.empty(999, 1001, dtype=dtype), p)
    assert found.dtype == dtype and found.unique().numel() == 2
    kept = (found > 0).float()
    assert kept.mean().item() == pytest.approx(1 - p, abs=4 * (p * (1 - p) / kept.numel()) ** 0.5)
    assert found.max().item() == pytest.approx(1 / (1 - p), rel=5e-3 if dtype == torch.bfloat16 else 2e-4)
    # Four neighbours share a number: neither they nor those of the next row may know of each other.
    flat = kept.flatten() - kept.mean()
    for distance in (1, 2, 3, 4, 1001):
        assert abs((flat[distance:] * flat[:-distance]).mean().item()) < 5 * p * (1 - p) / flat.numel() ** 0.5


def test_the_ends_of_the_scale() -> None:
    x = torch.randn(7)
    assert torch.equal(factors(x, 1.0), torch.zeros(7))
    layer = Dropout(0.4)
    assert layer.eval()(x) is x and Dropout(0.0)(x) is x
    torch.manual_seed(1)
    first = layer.train()(x)
    torch.manual_seed(1)
    assert torch.equal(first, layer(x)) and not torch.equal(first, layer(x))


def test_a_trained_student_drops_and_an_evaluated_one_does_not() -> None:
    student = tiny.make_model("distilbert", 2, dropout=0.5)
    names = list(student.state_dict())
    draw_less(student)
    assert sum(type(module) is Dropout for module in student.modules()) >= 5
    assert not any(type(module) is torch.nn.Dropout for module in student.modules())
    assert list(student.state_dict()) == names
    ids = torch.from_numpy(tiny.make_rows(4)).long()
    student.train()
    assert not torch.equal(hidden_states(student, ids, None), hidden_states(student, ids, None))
    student.eval()
    assert torch.equal(hidden_states(student, ids, None), hidden_states(student, ids, None))
