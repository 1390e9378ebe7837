"""A teacher known by draws: the visit in chunks, the readable path, several teachers and compilation agree."""

import shutil
from dataclasses import dataclass

import pytest
import torch
from heads import BOTH_HEADS, VOCAB, gradients, problem
from plain_losses import PlainLosses
from torch import Tensor
from torch.nn.functional import linear

from distill.models.language_model import Head
from distill.objective.chunked import CPU, ChunkedLosses, compiled_kernel
from distill.objective.terms import VocabularyTerm
from distill.objective.terms._distributions import SoftPositions
from distill.objective.terms.mlm import Mlm
from distill.objective.terms.soft import Soft
from distill.teacher.distributions import Mixture, Samples, Sparse, top_k_log_probs
from distill.teacher.sampling import as_samples, kept_entries


@dataclass
class Pair:
    """A student's head, what is known of the teacher, and targets."""

    student: Head
    teacher: Sparse | Mixture
    targets: Tensor
    scales: Tensor
    budget: int = CPU.budget

    def agree(self, terms: list[VocabularyTerm], relative: float = 3e-6, upstream: float = 1.0) -> None:
        """Loss, sums and gradients by chunks are those of all logits in float64, relative to the largest entry."""
        exact = Head(*(None if each is None else each.double() for each in self.student[:3]), torch.float64)
        want, want_sums = PlainLosses(terms, VOCAB)(exact, self.teacher, self.targets, self.scales.double())
        arguments = (self.student, self.teacher, self.targets, self.scales)
        loss, sums = ChunkedLosses(terms, VOCAB, tiling=CPU._replace(budget=self.budget))(*arguments)
        torch.testing.assert_close((loss.double(), sums.double()), (want, want_sums), rtol=relative, atol=1e-4)
        pairs = zip(gradients(loss, self.student, upstream), gradients(want, self.student, upstream), strict=True)
        for found, wanted in pairs:
            largest = wanted.abs().max().item() if wanted.numel() else 0.0
            torch.testing.assert_close(found, wanted, rtol=0, atol=relative * max(largest, 1e-6))


def draws(rows: int, top_k: int, seed: int = 3, temperature: float = 2.0) -> Samples:
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(rows, VOCAB, generator=generator)
    offsets = torch.rand(rows, generator=generator, dtype=torch.float64)
    found = as_samples(kept_entries(logits, top_k, 20, temperature, offsets))
    return found._replace(ids=found.ids.int())  # as they are read


def pair(rows: int = 41, top_k: int = 4, terms: int = 2, temperature: float = 2.0) -> Pair:
    case = problem(rows)
    assert case.targets is not None
    scales = torch.tensor([0.3, 0.07, 0.2])[:terms]
    return Pair(case.student, draws(rows, top_k, temperature=temperature), case.targets, scales)


@pytest.mark.parametrize("temperature", [1.0, 2.0, 3.7])
@pytest.mark.parametrize("top_k", [0, 4])
@pytest.mark.parametrize("rows", [0, 1, 41])
def test_chunks_give_the_plain_result(rows: int, top_k: int, temperature: float) -> None:
    pair(rows, top_k, temperature=temperature).agree([Soft(temperature), Mlm()], upstream=-2.5)


def test_without_words_and_beside_other_terms() -> None:
    pair(terms=1).agree([Soft()])
    pair(terms=3).agree(
        [Soft(), Mlm(), Soft(positions=SoftPositions.masked)], relative=1e-5
    )  # the last one by autograd


@pytest.mark.parametrize("rows_per_chunk", [1, 7, 40])
def test_chunks_of_any_size(rows_per_chunk: int) -> None:
    case = pair()
    case.budget = rows_per_chunk * BOTH_HEADS
    case.agree([Soft(), Mlm()])


def test_extreme_logits_stay_finite() -> None:
    case = pair(5)
    case.student = case.student._replace(rows=(case.student.rows.detach() * 1e4).requires_grad_())
    case.agree([Soft(), Mlm()], relative=2e-3)


def test_draws_of_several_teachers_give_the_mean_of_their_own_losses() -> None:
    case = pair()
    logits = torch.randn(41, VOCAB, generator=torch.Generator().manual_seed(6))
    live = Head(torch.randn(41, 8), torch.randn(VOCAB, 8), None, torch.float32)
    members = (draws(41, 4), draws(41, 0, seed=4), top_k_log_probs(logits, 8, 2.0), live)
    case.teacher = Mixture(members, (0.4, 0.3, 0.2, 0.1), 2.0)
    terms: list[VocabularyTerm] = [Soft(), Mlm()]
    loss, _ = ChunkedLosses(terms, VOCAB)(case.student, case.teacher, case.targets, case.scales)
    logits_of_live = linear(live.rows, live.weight)
    student = linear(*case.student[:3])[:, :VOCAB]
    want = 0.07 * torch.nn.functional.cross_entropy(student, case.targets, reduction="sum")
    for weight, member in zip(case.teacher.weights, (*members[:3], logits_of_live), strict=True):
        want = want + 0.3 * weight * Soft().losses(student, member, case.targets).sum()
    torch.testing.assert_close(loss, want, rtol=1e-5, atol=1e-4)
    for found, wanted in zip(gradients(loss, case.student), gradients(want, case.student), strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=2e-5 * float(wanted.abs().max()))


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a compiler")
@pytest.mark.slow
def test_compiled_gives_the_plain_result() -> None:
    case = pair()
    arguments, terms = (case.student, case.teacher, case.targets, case.scales), [Soft(), Mlm()]
    compiled, plain = (ChunkedLosses(terms, VOCAB, compiles)(*arguments)[0] for compiles in (True, False))
    assert compiled_kernel.works
    torch.testing.assert_close(compiled, plain, rtol=1e-5, atol=1e-5)
    for found, wanted in zip(gradients(compiled, case.student), gradients(plain, case.student), strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5 * float(wanted.abs().max()))
