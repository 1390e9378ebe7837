"""Any terms over the vocabulary by their formulas: visited in chunks, with the plain result."""

import pytest
import torch
from heads import BOTH_HEADS, VOCAB, Problem, assert_agrees, gradients, largest_allocation, problem
from plain_losses import PlainLosses, by_formulas
from torch import Tensor, nn

from distill.models.language_model import Head
from distill.objective import chunked
from distill.objective.chunked import CPU, ChunkedLosses, by_hand
from distill.objective.terms import VocabularyTerm
from distill.objective.terms._distributions import SoftPositions
from distill.objective.terms.mlm import Mlm
from distill.objective.terms.soft import Soft
from distill.teacher.distributions import TopK

# --- any terms, by their formulas ----------------------------------------------------------------------------------


class LogitError(VocabularyTerm):
    """Mean squared difference of the logits; a term that the hand-written kernel knows nothing of."""

    def losses(self, student: Tensor, teacher: Tensor | TopK | None, targets: Tensor) -> Tensor:
        assert isinstance(teacher, Tensor)
        return (student - teacher).square().mean(-1)


MASKED_SOFT = Soft(temperature=1.5, positions=SoftPositions.masked, cutoff=0.01)
MIXTURES: dict[str, list[VocabularyTerm]] = {
    "one": [LogitError()],
    "three": [Soft(), LogitError(), Mlm()],
    "two_temperatures": [Soft(temperature=1.0), MASKED_SOFT],
    "masked_soft_among_all": [MASKED_SOFT, Mlm(), LogitError()],
    "soft_twice": [Mlm(), Soft(), Soft(temperature=3.0), LogitError()],
    "pair": [Mlm(), Soft()],
    "soft": [Soft(cutoff=0.02)],
    "mlm": [Mlm()],
}


@pytest.mark.parametrize("rows", [0, 1, 41])
@pytest.mark.parametrize("mixture", MIXTURES)
def test_any_terms_are_visited_in_chunks_with_the_plain_result(mixture: str, rows: int) -> None:
    case, terms = problem(rows), MIXTURES[mixture]
    assert case.targets is not None
    targets = case.targets if mixture != "mlm" else case.targets.clamp(min=0)  # its rows all have a target
    scales = torch.linspace(0.2, 0.9, len(terms))
    want, want_sums = PlainLosses(terms, VOCAB)(
        case.student._replace(dtype=torch.float32), _fp32(case), targets, scales
    )
    got, got_sums = ChunkedLosses(terms, VOCAB)(case.student, case.teacher, targets, scales)
    small = ChunkedLosses(by_formulas(terms), VOCAB, tiling=CPU._replace(budget=7 * BOTH_HEADS))
    references = gradients(want, case.student, -2.5)
    for loss, sums in ((got, got_sums), small(case.student, case.teacher, targets, scales)):
        torch.testing.assert_close((loss, sums), (want, want_sums), rtol=1e-5, atol=2e-5)
        for mine, reference in zip(gradients(loss, case.student, -2.5), references, strict=True):
            largest = reference.abs().max().item() if reference.numel() else 0.0
            torch.testing.assert_close(mine, reference, rtol=0, atol=5e-6 * max(largest, 1e-6))


class Entropy(VocabularyTerm):
    """A term at every position that needs neither a teacher nor a target."""

    needs_teacher = False

    def losses(self, student: Tensor, teacher: Tensor | TopK | None, targets: Tensor) -> Tensor:
        log_q = student.log_softmax(-1)
        return -(log_q.exp() * log_q).sum(-1)


@pytest.mark.parametrize("terms", [[Entropy()], [Mlm(), Entropy()]], ids=["alone", "beside_mlm"])
def test_a_term_without_a_teacher_acts_on_every_row(terms: list[VocabularyTerm]) -> None:
    """Also on those without a target, which masked tokens alone leave out."""
    case, scales = problem(41), torch.linspace(0.2, 0.9, len(terms))
    assert case.targets is not None
    want, want_sums = PlainLosses(terms, VOCAB)(case.student._replace(dtype=torch.float32), None, case.targets, scales)
    got, got_sums = ChunkedLosses(terms, VOCAB)(case.student, None, case.targets, scales)
    torch.testing.assert_close((got, got_sums), (want, want_sums), rtol=1e-5, atol=2e-5)
    for mine, reference in zip(gradients(got, case.student), gradients(want, case.student), strict=True):
        torch.testing.assert_close(mine, reference, rtol=0, atol=5e-6 * reference.abs().max().item())


def test_the_pair_keeps_its_kernel_beside_other_terms(monkeypatch: pytest.MonkeyPatch) -> None:
    visited, kernel = [], chunked.soft_and_tokens
    monkeypatch.setattr(chunked, "soft_and_tokens", lambda *args: visited.append(args[-2:]) or kernel(*args))
    case = problem(8)
    terms = [Mlm(), LogitError(), Soft(temperature=3.0)]
    assert case.targets is not None
    ChunkedLosses(terms, VOCAB)(case.student, case.teacher, case.targets, torch.ones(3))
    assert visited == [(3.0, 0.0)]
    assert by_hand(terms) == (terms[2], terms[0])
    assert by_hand([LogitError(), *by_formulas(terms)]) == (None, None)


class Scaled(VocabularyTerm):
    """A term with numbers of its own that are learned: a factor of each logit, and one that no row uses."""

    def __init__(self, positions: str) -> None:
        self.positions = positions
        self.module = nn.ParameterList([torch.linspace(0.5, 1.5, VOCAB), torch.ones(3)])
        self.module[1].requires_grad_(positions == "all")

    def losses(self, student: Tensor, teacher: Tensor | TopK | None, targets: Tensor) -> Tensor:
        assert isinstance(teacher, Tensor) and self.module is not None
        return (student * self.module[0] - teacher).square().mean(-1)  # type: ignore[index]


@pytest.mark.parametrize("positions", ["all", "targets"])
@pytest.mark.parametrize("others", [[], [Mlm()], [LogitError()]], ids=["alone", "beside_the_kernel", "beside_another"])
def test_the_module_of_a_term_is_trained_as_by_the_plain_losses(others: list[VocabularyTerm], positions: str) -> None:
    """In chunks, with the gradients of two micro-batches added up, both of which are read before the first backward."""
    term = Scaled(positions)
    terms, cases = [*others, term], [problem(41), problem(17)]
    scales = torch.linspace(0.2, 0.9, len(terms))
    assert term.module is not None
    found = []
    for losses in (PlainLosses(terms, VOCAB), ChunkedLosses(terms, VOCAB, tiling=CPU._replace(budget=7 * BOTH_HEADS))):
        term.module.zero_grad()
        results = []
        for case in cases:
            assert case.targets is not None
            student = case.student._replace(dtype=torch.float32)
            results.append(losses(student, _fp32(case), case.targets, scales)[0])
        for loss, upstream in zip(results, (1.0, -2.5), strict=True):
            (loss * upstream).backward()
        found.append((torch.stack(results).detach(), term.module[0].grad.clone()))  # type: ignore[index, union-attr]
    (want, reference), (got, mine) = found
    assert reference.abs().max() > 0.1
    torch.testing.assert_close(got, want, rtol=1e-5, atol=2e-5)
    torch.testing.assert_close(mine, reference, rtol=0, atol=5e-6 * reference.abs().max().item())


def _fp32(case: Problem) -> Head:
    assert case.teacher is not None
    return case.teacher._replace(dtype=torch.float32)


def test_any_terms_keep_nothing_of_rows_by_vocabulary() -> None:
    case = problem(400)
    largest = largest_allocation(
        lambda: ChunkedLosses([LogitError()], VOCAB, tiling=CPU._replace(budget=20 * BOTH_HEADS))(
            case.student, case.teacher, case.targets, torch.ones(1)
        )[0].backward()
    )
    assert largest <= max(20 * BOTH_HEADS, CPU.block, case.student.weight.numel() * 4) < 400 * VOCAB * 4


def test_any_terms_learn_from_largest_entries_too() -> None:
    case = problem()
    case.kept = 8
    assert_agrees(case)
    scales = torch.tensor([0.3, 0.07])
    losses = ChunkedLosses(by_formulas([Soft(), Mlm()]), VOCAB)
    loss, sums = losses(case.student, case.top_k(), case.targets, scales)
    want, want_sums = case.fused()
    torch.testing.assert_close((loss, sums), (want, want_sums), rtol=1e-5, atol=1e-5)
    for mine, reference in zip(gradients(loss, case.student), gradients(want, case.student), strict=True):
        torch.testing.assert_close(mine, reference, rtol=1e-4, atol=1e-6)
