"""Several teachers: the mean of their distributions at the temperature, against float64 and by either path."""

import math
from typing import Any

import pytest
import torch
from heads import BOTH_HEADS, TEACHER_WIDTH, VOCAB, Problem, gradients, largest_allocation, problem, samples
from plain_losses import PlainLosses, by_formulas
from torch import Tensor
from torch.nn.functional import linear

from distill.models.language_model import Head
from distill.objective.chunked import CPU
from distill.objective.objective import mixing_temperature
from distill.objective.terms import VocabularyTerm
from distill.objective.terms.jsd import Jsd
from distill.objective.terms.logit_mse import LogitMse
from distill.objective.terms.mlm import Mlm
from distill.objective.terms.reverse_kl import ReverseKl
from distill.objective.terms.soft import Soft
from distill.runtime.errors import SettingError
from distill.teacher.distributions import Mixture, TopK, mixed_logits, top_k_log_probs

WEIGHTS = (0.5, 0.2, 0.3)


def head(rows: int, padding: int, seed: int, bias: bool = True) -> Head:
    """A teacher's head, its vocabulary padded with entries that would take all the probability."""
    torch.manual_seed(seed)
    weight = torch.randn(VOCAB + padding, TEACHER_WIDTH) * 3 * TEACHER_WIDTH**-0.5
    own = torch.randn(VOCAB + padding)
    own[VOCAB:] = 50.0
    return Head(torch.randn(rows, TEACHER_WIDTH), weight, own if bias else None, torch.float32)


def members(rows: int = 41) -> tuple[Head, ...]:
    return head(rows, 1, 5), head(rows, 40, 6, bias=False), head(rows, 7, 7)


def mixed(terms: list[VocabularyTerm], rows: int = 41, teachers: Any = None, temperature: float = 2.0) -> Problem:
    case = problem(rows)
    case.terms, case.teacher = terms, Mixture(teachers or members(rows), WEIGHTS, temperature)
    return case


def exact_logits(one: Head) -> Tensor:
    """[N, VOCAB] in float64, with the gradients of fp32 tensors."""
    weight, bias = one.weight[:VOCAB].double(), None if one.bias is None else one.bias[:VOCAB].double()
    return linear(one.rows.double(), weight, bias)


def mean_probabilities(heads: tuple[Head, ...], temperature: float) -> Tensor:
    parts = [w * (exact_logits(one) / temperature).softmax(-1) for w, one in zip(WEIGHTS, heads, strict=True)]
    return torch.stack(parts).sum(0)


def divergence(p: Tensor, q: Tensor) -> Tensor:
    """KL(p || q), [N]."""
    return torch.where(p > 0, p * (p.log() - q.log()), torch.zeros_like(p)).sum(-1)


def results(case: Problem) -> list[tuple[Tensor, Tensor]]:
    """Loss and sums on all logits, in chunks, in small ones, and by formulas."""
    plain = PlainLosses(case.terms, VOCAB)
    student = case.student._replace(dtype=torch.float32)
    return [
        plain(student, case.teacher, case.targets, case.scales.float()),
        case.chunked(),
        case.chunked(budget=5 * BOTH_HEADS),
        case.chunked(by_formulas(case.terms), budget=5 * BOTH_HEADS),
    ]


def assert_gradients(loss: Tensor, want: Tensor, student: Head) -> None:
    references = torch.autograd.grad(-2.5 * want, [each for each in student[:3] if each is not None], retain_graph=True)
    for found, wanted in zip(gradients(loss, student, -2.5), references, strict=True):
        largest = float(wanted.abs().max()) if wanted.numel() else 0.0
        torch.testing.assert_close(found, wanted, rtol=0, atol=2e-5 * max(largest, 1e-6))


@pytest.mark.parametrize("temperature", [1.0, 2.0, 3.7])
@pytest.mark.parametrize("rows", [0, 1, 41])
def test_the_loss_is_the_divergence_from_the_mean(rows: int, temperature: float) -> None:
    """With vocabularies padded to three sizes, and masked tokens beside."""
    case = mixed([Soft(temperature), Mlm()], rows, temperature=temperature)
    logits = exact_logits(case.student)
    soft = divergence(mean_probabilities(members(rows), temperature), (logits / temperature).softmax(-1)).sum()
    words = torch.nn.functional.cross_entropy(logits, case.targets, reduction="sum")
    want = 0.3 * temperature**2 * soft + 0.07 * words
    for loss, sums in results(case):
        wanted = torch.stack([temperature**2 * soft, words]).detach()
        torch.testing.assert_close(sums.double(), wanted, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(loss.double(), want, rtol=1e-5, atol=1e-5)
        assert_gradients(loss, want, case.student)


@pytest.mark.parametrize("term", [ReverseKl(1.5), Jsd(1.5, beta=0.3), Soft(1.5, cutoff=0.01), LogitMse(center=True)])
def test_every_loss_over_the_vocabulary_reads_the_mixture(term: VocabularyTerm) -> None:
    """As it would read one teacher whose logits are T log p, p being the mean."""
    case = mixed([term], temperature=1.5)
    teacher = 1.5 * mean_probabilities(members(), 1.5).log()
    want = 0.3 * term.losses(exact_logits(case.student), teacher, case.targets).sum()
    for loss, _ in results(case):
        torch.testing.assert_close(loss.double(), want, rtol=1e-5, atol=1e-5)
        assert_gradients(loss, want, case.student)


def test_weights_may_differ_by_position() -> None:
    """Where a member has none, what it gives does not count."""
    case, temperature = mixed([Soft(1.5), Mlm()], temperature=1.5), 1.5
    weights = torch.rand(41, 3, generator=torch.Generator().manual_seed(3)) * (torch.arange(123).view(41, 3) % 5 > 1)
    weights[:, 1] += 0.1
    weights /= weights.sum(1, keepdim=True)
    case.teacher = case.teacher._replace(weights=weights)
    parts = [(exact_logits(one) / temperature).softmax(-1) for one in members()]
    mean = sum(weight[:, None].double() * part for weight, part in zip(weights.T, parts, strict=True))
    logits = exact_logits(case.student)
    want = 0.3 * temperature**2 * divergence(mean, (logits / temperature).softmax(-1)).sum()
    want = want + 0.07 * torch.nn.functional.cross_entropy(logits, case.targets, reduction="sum")
    for loss, _ in results(case):
        torch.testing.assert_close(loss.double(), want, rtol=1e-5, atol=1e-5)
        assert_gradients(loss, want, case.student)


def test_extreme_logits_stay_finite_and_right() -> None:
    sure = torch.tensor([[3e4, 0.0, -3e4]])
    found = mixed_logits([sure, -sure], (0.75, 0.25), 2.0)
    torch.testing.assert_close((found / 2).softmax(-1), torch.tensor([[0.75, 0.0, 0.25]]))
    assert float(found[0, 1]) == pytest.approx(-3e4 + 2 * math.log(1), rel=1e-4)


def test_nothing_of_rows_by_vocabulary_is_made() -> None:
    case = mixed([Soft()], 400)
    visit = lambda: case.chunked(by_formulas(case.terms), budget=20 * BOTH_HEADS)[0].backward()  # noqa: E731
    limit = max(20 * BOTH_HEADS, CPU.block, case.teacher.members[1].weight.numel() * 4)
    assert largest_allocation(visit) <= limit < 400 * VOCAB * 4


# --- members that are read from caches


def cached(one: Head, kept: int) -> TopK:
    ids, log_probs = top_k_log_probs(exact_logits(one).float(), kept, 2.0)
    return TopK(ids.int(), log_probs)


def test_members_known_by_entries_samples_and_logits_give_the_mean_of_their_own_losses() -> None:
    case = problem()
    live = head(41, 0, 6, bias=False)
    known = (samples(), samples(kept=0, seed=4), cached(members()[0], 8), live)
    weights = (0.4, 0.3, 0.2, 0.1)
    case.teacher = Mixture(known, weights, 2.0)
    student = exact_logits(case.student)
    want = 0.07 * torch.nn.functional.cross_entropy(student, case.targets, reduction="sum")
    for weight, member in zip(weights, (*known[:3], exact_logits(live)), strict=True):
        want = want + 0.3 * weight * Soft().losses(student, member, case.targets).sum()
    for loss, _ in results(case):
        torch.testing.assert_close(loss.double(), want, rtol=1e-5, atol=1e-4)
        assert_gradients(loss, want, case.student)


# --- the temperature of the mixture


class Own(VocabularyTerm):
    """A user's, at temperature 1."""

    def losses(self, student: Tensor, teacher: Tensor | TopK | None, targets: Tensor) -> Tensor:
        raise NotImplementedError


def test_the_temperature_is_that_of_the_terms_that_read_the_mixture() -> None:
    assert mixing_temperature({"soft": Soft(3.0), "mlm": Mlm(), "logit_mse": LogitMse(), "jsd": Jsd(3.0)}) == 3.0
    assert mixing_temperature({"logit_mse": LogitMse()}) == mixing_temperature({"mine": Own()}) == 1.0


@pytest.mark.parametrize("other", [Own(), ReverseKl(1.0)])
def test_two_temperatures_are_refused_by_both_names(other: VocabularyTerm) -> None:
    with pytest.raises(SettingError, match=r"objective\.soft\.temperature=2\.0, objective\.mine\.temperature=1\.0"):
        mixing_temperature({"soft": Soft(2.0), "mine": other})
