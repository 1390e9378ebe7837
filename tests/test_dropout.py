"""Dropout and attention on the CPU: torch's own up to the random numbers, in value and gradient."""

import copy
from typing import Any

import pytest
import tiny
import torch
from torch.nn.functional import scaled_dot_product_attention

from distill.config import Precision
from distill.dropout import NAME, Dropout, attention, factors, lighten
from distill.models import TRANSFORMS, hidden_states

CPU = torch.device("cpu")


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


@pytest.mark.parametrize("mask", [None, "bool", "added"])
def test_attention_is_torchs(mask: str | None) -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(3, 4, 17, 8, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    real = torch.arange(17) < torch.tensor([17, 5, 11])[:, None]
    allowed = None if mask is None else real[:, None, None, :].expand(3, 1, 17, 17)
    if mask == "added":
        allowed = torch.zeros(3, 1, 17, 17, dtype=torch.bfloat16).masked_fill(~real[:, None, None, :], -1e30)
    upstream = torch.randn(3, 4, 17, 8)

    def of(output: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (output, *torch.autograd.grad((output * upstream).sum(), (query, key, value)))

    made, weights = attention(torch.nn.Module(), query, key, value, allowed, scaling=0.3)
    assert weights is None and made.dtype == torch.bfloat16
    doubles = (t.double() for t in (query, key, value))
    exact = None if allowed is None or mask == "bool" else allowed.double()
    reference = scaled_dot_product_attention(*doubles, attn_mask=allowed if exact is None else exact, scale=0.3)
    for ours, theirs in zip(of(made.transpose(1, 2)), of(reference), strict=True):
        torch.testing.assert_close(ours.double(), theirs.double(), rtol=0.03, atol=0.03)


def test_attention_weights_are_dropped() -> None:
    torch.manual_seed(0)
    query, key = torch.zeros(2, 3, 64, 8), torch.zeros(2, 3, 64, 8)  # all weights alike: 1/64
    made, _ = attention(torch.nn.Module(), query, key, torch.ones(2, 3, 64, 8), None, dropout=0.25)
    assert made.shape == (2, 64, 3, 8)
    kept = made[..., 0] * 64 * 0.75  # of 64 values, each with probability 3/4
    torch.testing.assert_close(kept, kept.round(), rtol=0, atol=1e-3)
    assert kept.mean().item() == pytest.approx(48, abs=4 * 3.5 / kept.numel() ** 0.5)
    assert 2.5 < kept.std().item() < 4.5  # sqrt(64 * 3/16) = 3.46


def hidden(model: Any, padded: bool) -> torch.Tensor:
    """At the positions that are no padding: [A, H]."""
    ids = torch.from_numpy(tiny.make_rows(4, shortest=5 if padded else None, seed=3)).long()
    return hidden_states(model, ids, ids != tiny.PAD if padded else None)[ids != tiny.PAD]


def trained(model: Any) -> list[torch.nn.Parameter]:
    """What the last hidden state depends on."""
    return [p for name, p in model.base_model.named_parameters() if "pooler" not in name]


@pytest.mark.parametrize("family", sorted(TRANSFORMS))
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-5), ("bf16", 0.05)])
def test_a_family_computes_what_it_did(family: str, padded: bool, precision: str, tolerance: float) -> None:
    student = tiny.make_model(family, 2, dropout=0.0).train()
    lightened = copy.deepcopy(student)
    lighten(lightened, Precision(student=precision), CPU)
    assert lightened.config._attn_implementation == NAME
    assert lightened.state_dict().keys() == student.state_dict().keys()
    assert NAME not in lightened.config.to_json_string()
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
        made, expected = hidden(lightened, padded), hidden(student, padded)
    assert (made - expected).norm() < tolerance * expected.norm()
    upstream = torch.randn(made.shape)
    ours, theirs = (
        torch.cat([g.flatten() for g in torch.autograd.grad(output, weights, upstream.to(output.dtype))])
        for output, weights in ((made, trained(lightened)), (expected, trained(student)))
    )
    assert (ours - theirs).norm() < tolerance * theirs.norm()


def test_a_trained_student_drops_and_an_evaluated_one_does_not() -> None:
    student = tiny.make_model("distilbert", 2, dropout=0.5)
    lighten(student, Precision(), CPU)
    assert sum(type(module) is Dropout for module in student.modules()) >= 5
    student.train()
    assert not torch.equal(hidden(student, False), hidden(student, False))
    student.eval()
    assert torch.equal(hidden(student, False), hidden(student, False))


@pytest.mark.parametrize("reason", ["compiled", "unknown family", "gpu"])
def test_what_is_left_alone(reason: str) -> None:
    student = tiny.make_model("bert", 1)
    if reason == "unknown family":
        student.config.model_type = "mine"
    device = torch.device("cuda" if reason == "gpu" else "cpu")
    lighten(student, Precision(compile=reason == "compiled"), device)
    assert student.config._attn_implementation == "sdpa"
    assert not any(type(module) is Dropout for module in student.modules())
