"""A loss of a user's own that reads the heads of both models, beside terms over the vocabulary."""

import sys
from typing import Any

import pytest
import torch
from pairs import window
from tiny import loss_of, make_model, make_objective, objective_config
from torch import Tensor
from torch.nn.functional import kl_div, pad

from distill import OutputSpec, Term

HEADS = OutputSpec(head=True)
THIS = {"weight": 0.7}


class Divergence(Term):
    """The forward divergence at every position, from all logits at once."""

    student_reads = teacher_reads = HEADS

    def count(self, batch: Any) -> int:
        return batch.num_valid

    def loss_sum(self, student: Any, teacher: Any, batch: Any) -> Tensor:
        logits = student.head.logits(), teacher.distribution.logits()
        q, p = (each.log_softmax(-1) for each in logits)
        return kl_div(q, p, reduction="sum", log_target=True)


class Sorted(Divergence):
    """The distance of sorted probabilities, whatever tokens have them (Boizard et al. 2024)."""

    def loss_sum(self, student: Any, teacher: Any, batch: Any) -> Tensor:
        q, p = (each.logits().softmax(-1).sort(-1, descending=True)[0] for each in (student.head, teacher.distribution))
        size = max(q.shape[1], p.shape[1])
        return (pad(q, (0, size - q.shape[1])) - pad(p, (0, size - p.shape[1]))).abs().sum()


def own(name: str) -> dict[str, Any]:
    return {"_target_": f"test_head_terms.{name}", **THIS}


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "test_head_terms", sys.modules[__name__])


def gradients(model: Any) -> dict[str, Tensor]:
    return {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}


@pytest.mark.parametrize("rows", ["all", "masked"])
def test_it_is_computed_at_every_position_and_leaves_the_others_as_they_are(teacher: Any, rows: str) -> None:
    """Its value and gradient are those of `soft`, and rows that only it reads carry no other term."""
    batches, student = window(2), make_model("distilbert", 1, seed=2)
    found = {}
    for name, more in {
        "own": {"mine": own("Divergence")},
        "soft": {"second": {"kind": "soft", "temperature": 1.0, **THIS}},
        "without": {},
    }.items():
        settings = objective_config(soft=3.0, mlm=2.0, cosine=0.0, rows=rows, **more)
        student.zero_grad()
        loss, sums = loss_of(make_objective(settings, student, teacher), student, teacher, batches)
        loss.backward()
        found[name] = loss.detach(), sums, gradients(student)
    (loss, sums, mine), (want, want_sums, reference), (_, others, _) = found.values()
    torch.testing.assert_close(loss, want, rtol=1e-5, atol=1e-5)
    assert sums["mine"] == pytest.approx(want_sums["second"], rel=1e-5)
    for name in ("soft", "mlm"):
        assert sums[name] == pytest.approx(others[name], rel=1e-5), name
    largest = max(float(gradient.abs().max()) for gradient in reference.values())
    for name, gradient in reference.items():
        torch.testing.assert_close(mine[name], gradient, rtol=0, atol=1e-5 * largest)


def test_it_may_compare_two_vocabularies(teacher: Any) -> None:
    settings = objective_config(soft=0.0, mlm=0.0, cosine=0.0, mine=own("Sorted"))
    student = make_model("distilbert", 1, seed=2)
    student.resize_token_embeddings(student.config.vocab_size + 16)
    loss, _ = loss_of(make_objective(settings, student, teacher), student, teacher, window(2))
    loss.backward()
    assert 0 < float(loss) / THIS["weight"] < 2 and float(student.get_output_embeddings().weight.grad.abs().max()) > 0


def test_the_logits_of_a_head_are_capped_as_the_model_caps_them(teacher: Any) -> None:
    from distill.models.language_model import Head

    rows, weight = torch.randn(3, 4), torch.randn(7, 4)
    torch.testing.assert_close(Head(rows, weight, softcap=2.0).logits(), 2 * (rows @ weight.T / 2).tanh())
