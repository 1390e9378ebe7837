"""Several teachers: the mean of their distributions at the temperature, against float64 and by either path."""

import math

import pytest
import torch
from heads import BOTH_HEADS, TEACHER_WIDTH, VOCAB, gradients, largest_allocation, problem
from plain_losses import PlainLosses, by_formulas
from torch import Tensor
from torch.nn.functional import linear

from distill.models.language_model import Head
from distill.objective import losses
from distill.objective.chunked import CPU, NO_TARGET, ChunkedLosses
from distill.objective.objective import mixing_temperature
from distill.objective.terms import VocabularyTerm
from distill.objective.terms._distributions import SoftPositions
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


def members(rows: int) -> tuple[Head, ...]:
    return head(rows, 1, 5), head(rows, 40, 6, bias=False), head(rows, 7, 7)


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


@pytest.mark.parametrize("temperature", [1.0, 2.0, 3.7])
@pytest.mark.parametrize("path", ["plain", "chunked", "small", "other_block"])
@pytest.mark.parametrize("rows", [0, 1, 41])
def test_the_loss_is_the_divergence_from_the_mean(rows: int, path: str, temperature: float) -> None:
    """Value and all gradients, with vocabularies padded to three sizes, masked tokens beside, and another upstream."""
    case, heads = problem(rows), members(rows)
    assert case.targets is not None
    terms: list[VocabularyTerm] = [Soft(temperature), Mlm()]
    scales, mixture = torch.tensor([0.3, 0.07]), Mixture(heads, WEIGHTS, temperature)
    student = case.student._replace(dtype=torch.float32)
    arguments = (student, mixture, case.targets)
    if path == "plain":
        loss, sums = PlainLosses(terms, VOCAB)(*arguments, scales)
    elif path == "chunked":
        loss, sums = ChunkedLosses(terms, VOCAB)(*arguments, scales)
    else:
        budget = (5 if path == "small" else 99) * BOTH_HEADS
        loss, sums = ChunkedLosses(by_formulas(terms), VOCAB, tiling=CPU._replace(budget=budget))(*arguments, scales)
    logits = exact_logits(student)
    soft = temperature**2 * divergence(mean_probabilities(heads, temperature), (logits / temperature).softmax(-1)).sum()
    words = losses.mlm(logits, case.targets).sum()
    want = 0.3 * soft + 0.07 * words
    torch.testing.assert_close(sums.double(), torch.stack([soft, words]).detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(loss.double(), want, rtol=1e-5, atol=1e-5)
    pairs = zip(gradients(loss, case.student, -2.5), gradients(want, case.student, -2.5), strict=True)
    for found, wanted in pairs:
        largest = float(wanted.abs().max()) if wanted.numel() else 0.0
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5 * max(largest, 1e-6))


@pytest.mark.parametrize("term", [ReverseKl(1.5), Jsd(1.5, beta=0.3), Soft(1.5, cutoff=0.01), LogitMse(center=True)])
def test_every_loss_over_the_vocabulary_reads_the_mixture(term: VocabularyTerm) -> None:
    """As it would read one teacher whose logits are T log p, p being the mean."""
    case, heads = problem(), members(41)
    assert case.targets is not None
    mixture, scales = Mixture(heads, WEIGHTS, 1.5), torch.ones(1)
    logits = exact_logits(case.student)
    want = term.losses(logits, 1.5 * mean_probabilities(heads, 1.5).log(), case.targets).sum()
    references = gradients(want, case.student)
    for loss, _ in (
        ChunkedLosses([term], VOCAB)(case.student, mixture, case.targets, scales),
        PlainLosses([term], VOCAB)(case.student._replace(dtype=torch.float32), mixture, case.targets, scales),
    ):
        torch.testing.assert_close(loss.double(), want, rtol=1e-5, atol=1e-5)
        for found, wanted in zip(gradients(loss, case.student), references, strict=True):
            torch.testing.assert_close(found, wanted, rtol=0, atol=2e-5 * float(wanted.abs().max()))


def test_probabilities_are_averaged_at_the_temperature_itself() -> None:
    """Mixed at 1 and divided by T afterwards they would be others."""
    logits = [exact_logits(one) for one in members(41)]
    at_two = (mixed_logits(logits, WEIGHTS, 2.0) / 2).softmax(-1)
    torch.testing.assert_close(at_two, mean_probabilities(members(41), 2.0), rtol=1e-10, atol=1e-14)
    afterwards = (mixed_logits(logits, WEIGHTS, 1.0) / 2).softmax(-1)
    assert float((at_two - afterwards).abs().max()) > 0.01


def test_extreme_logits_stay_finite_and_right() -> None:
    sure = torch.tensor([[3e4, 0.0, -3e4]])
    mixed = mixed_logits([sure, -sure], (0.75, 0.25), 2.0)
    assert mixed.isfinite().all()
    torch.testing.assert_close((mixed / 2).softmax(-1), torch.tensor([[0.75, 0.0, 0.25]]))
    assert float(mixed[0, 1]) == pytest.approx(-3e4 + 2 * math.log(1), rel=1e-4)


def test_each_member_may_have_a_format_of_its_own() -> None:
    case, heads = problem(), members(41)
    rough = Mixture((heads[0]._replace(dtype=torch.bfloat16), *heads[1:]), WEIGHTS, 2.0)
    results = [
        ChunkedLosses([Soft()], VOCAB)(case.student, mixture, torch.full((41,), -100), torch.ones(1))[0]
        for mixture in (Mixture(heads, WEIGHTS, 2.0), rough)
    ]
    assert results[0] != results[1]
    torch.testing.assert_close(results[1], results[0], rtol=1e-2, atol=0)


def test_nothing_of_rows_by_vocabulary_is_kept_or_made() -> None:
    case, heads = problem(400), members(400)
    mixture = Mixture(heads, WEIGHTS, 2.0)
    kept: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor.numel())
        return tensor

    def visit() -> Tensor:
        losses = ChunkedLosses(by_formulas([Soft()]), VOCAB, tiling=CPU._replace(budget=20 * BOTH_HEADS))
        return losses(case.student, mixture, torch.full((400,), NO_TARGET), torch.ones(1))[0]

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        visit()
    assert max(kept) <= case.student.weight.numel() < 400 * VOCAB
    limit = max(20 * BOTH_HEADS, CPU.block, heads[1].weight.numel() * 4)
    assert largest_allocation(lambda: visit().backward()) <= limit < 400 * VOCAB * 4


# --- members that are read from caches


def cached(one: Head, kept: int, temperature: float) -> TopK:
    ids, log_probs = top_k_log_probs(exact_logits(one).float(), kept, temperature)
    return TopK(ids.int(), log_probs)


@pytest.mark.parametrize("path", ["plain", "chunked", "joined"])
@pytest.mark.parametrize("which", ["all", "some"])
def test_cached_members_have_the_gradient_of_the_mixture(which: str, path: str) -> None:
    """With almost all entries kept; the value is larger by the members' mutual divergence."""
    case, heads = problem(), members(41)
    assert case.targets is not None
    targets, scales = case.targets, torch.tensor([0.3, 0.07])
    terms: list[VocabularyTerm] = [Soft(), Mlm()]
    if path == "joined":  # a second soft term, which the hand-written kernel leaves to autograd
        terms, scales = [*terms, Soft(positions=SoftPositions.masked)], torch.tensor([0.3, 0.07, 0.4])
    live, live_sums = ChunkedLosses(terms, VOCAB)(case.student, Mixture(heads, WEIGHTS, 2.0), targets, scales)
    sources = [cached(one, VOCAB - 1, 2.0) for one in heads]
    mixture = Mixture((sources[0], sources[1], sources[2] if which == "all" else heads[2]), WEIGHTS, 2.0)
    if path == "plain":
        student = case.student._replace(dtype=torch.float32)
        loss, sums = PlainLosses(terms, VOCAB)(student, mixture, targets, scales)
    else:
        loss, sums = ChunkedLosses(terms, VOCAB)(case.student, mixture, targets, scales)
    for found, wanted in zip(gradients(loss, case.student, -2.5), gradients(live, case.student, -2.5), strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=2e-5 * float(wanted.abs().max()))
    mean = mean_probabilities(heads, 2.0)
    apart = torch.stack(
        [w * divergence((exact_logits(one) / 2).softmax(-1), mean) for w, one in zip(WEIGHTS, heads, strict=True)]
    ).sum(0)
    mutual = 4 * float(apart.sum())
    assert mutual > 1 and float(sums[0] - live_sums[0]) == pytest.approx(mutual, rel=1e-4)
    assert float(sums[1]) == pytest.approx(float(live_sums[1]), rel=1e-5)


def test_few_entries_of_each_member_give_the_mean_of_their_own_losses() -> None:
    case, heads = problem(), members(41)
    assert case.targets is not None
    sources = tuple(cached(one, 8, 2.0) for one in heads)
    arguments = (case.targets, torch.ones(1))
    loss, _ = ChunkedLosses([Soft()], VOCAB)(case.student, Mixture(sources, WEIGHTS, 2.0), *arguments)
    pairs = zip(WEIGHTS, sources, strict=True)
    own = [w * ChunkedLosses([Soft()], VOCAB)(case.student, source, *arguments)[0] for w, source in pairs]
    want = torch.stack(own).sum()
    torch.testing.assert_close(loss, want, rtol=1e-5, atol=1e-5)
    for found, wanted in zip(gradients(loss, case.student), gradients(want, case.student), strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5 * float(wanted.abs().max()))


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
    with pytest.raises(SettingError) as error:
        mixing_temperature({"soft": Soft(2.0), "mine": other})
    line = str(error.value)
    assert "objective.soft.temperature=2.0" in line and "objective.mine.temperature=1.0" in line and "\n" not in line
