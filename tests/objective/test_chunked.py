"""The losses in chunks against all logits in float64: value, gradients, chunks, formats, and what they keep."""

import shutil
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from heads import BOTH_HEADS, VOCAB, Problem, gradients, largest_allocation, problem, samples
from plain_losses import PlainLosses, by_formulas
from torch import Tensor, nn
from torch.nn.functional import linear

from distill.models.language_model import Head
from distill.objective.chunked import CPU, GPU, NO_TARGET, ChunkedLosses, by_hand, compiled_kernel
from distill.objective.terms import VocabularyTerm
from distill.objective.terms._distributions import SoftPositions
from distill.objective.terms.jsd import Jsd
from distill.objective.terms.logit_mse import LogitMse
from distill.objective.terms.mlm import Mlm
from distill.objective.terms.reverse_kl import ReverseKl
from distill.objective.terms.soft import Soft
from distill.teacher.distributions import TopK, top_k_log_probs

MASKED = SoftPositions.masked
MASKED_SOFT = Soft(temperature=1.5, positions=MASKED, cutoff=0.01)


class Entropy(VocabularyTerm):
    """A term at every position that needs neither a teacher nor a target."""

    needs_teacher = False

    def losses(self, student: Tensor, teacher: Any, targets: Tensor) -> Tensor:
        log_q = student.log_softmax(-1)
        return -(log_q.exp() * log_q).sum(-1)


def soft(temperature: float = 2.0, cutoff: float = 0.0) -> Soft:
    term = Soft(temperature)
    term.cutoff = cutoff  # also one that the setting refuses, which cuts everything
    return term


def top_k(case: Problem, kept: int, temperature: float = 2.0) -> TopK:
    ids, log_probs = top_k_log_probs(linear(*case.teacher[:3])[:, : case.vocab], kept, temperature)
    return TopK(ids.int(), log_probs.half())


def made(terms: list[VocabularyTerm] | None = None, teacher: Any = "head", softcap: Any = None, **rows: Any) -> Problem:
    """`teacher`: "head", None, the number of its entries that are kept, or samples."""
    case = problem(**rows)
    case.terms = terms or case.terms
    case.student = case.student._replace(softcap=softcap)
    if isinstance(teacher, int):
        case.teacher = top_k(case, teacher, case.terms[0].temperature)
    elif teacher != "head":
        case.teacher = teacher
    return case


CASES: dict[str, Callable[[], Problem]] = {
    "pair": made,
    "pair_at_1": lambda: made([soft(1.0), Mlm()], masked=0.5),
    "pair_at_3.7": lambda: made([Mlm(), soft(3.7)], masked=1.0),
    "no_rows": lambda: made(rows=0),
    "one_row": lambda: made(rows=1),
    "no_targets": lambda: made(masked=0.0),
    "soft": lambda: made([soft()]),
    "mlm": lambda: made([Mlm()]),
    "mlm_without_a_teacher": lambda: made([Mlm()], None),
    "no_bias": lambda: made(bias=False),
    "capped": lambda: made(bias=False, softcap=3.0),
    "capped_others": lambda: made([Mlm(), LogitMse()], bias=False, softcap=3.0),
    **{f"cutoff_{cutoff}": lambda cutoff=cutoff: made([soft(2.0, cutoff), Mlm()]) for cutoff in (1e-4, 1e-2, 0.3, 2.0)},
    **{f"top_{kept}": lambda kept=kept: made([soft(1.0), Mlm()], kept) for kept in (1, 8, VOCAB - 1)},
    "top_8_at_3.7": lambda: made([soft(3.7), Mlm()], 8),
    "top_8_alone": lambda: made([soft()], 8, rows=1),
    "samples": lambda: made(teacher=samples()),
    "samples_at_1": lambda: made([soft(1.0), Mlm()], samples(temperature=1.0)),
    "samples_at_3.7": lambda: made([soft(3.7)], samples(kept=0, temperature=3.7)),
    "samples_and_others": lambda: made([Soft(), Mlm(), Soft(positions=MASKED)], samples()),
    "reverse": lambda: made([ReverseKl()]),
    "jsd": lambda: made([Jsd(3.7, beta=0.9), Mlm()]),
    "jsd_masked": lambda: made([Jsd(1.0, SoftPositions.targets, beta=0.1)], masked=0.4),
    "logit_mse": lambda: made([LogitMse()]),
    "logit_mse_masked": lambda: made([LogitMse(MASKED, center=True)]),
    "three": lambda: made([Soft(), LogitMse(), Mlm()]),
    "two_temperatures": lambda: made([Soft(1.0), MASKED_SOFT]),
    "masked_soft_among_all": lambda: made([MASKED_SOFT, Mlm(), LogitMse()]),
    "soft_twice": lambda: made([Mlm(), Soft(), Soft(3.0), LogitMse()]),
    "no_target_and_no_teacher": lambda: made([Entropy()], None),
    "entropy_beside_mlm": lambda: made([Mlm(), Entropy()], None),
}
WAYS: dict[str, dict[str, Any]] = {
    "whole": {},
    "one_row": {"budget": BOTH_HEADS, "upstream": -2.5},
    "seven_rows": {"budget": 7 * BOTH_HEADS},
    "gpu": {"tiling": GPU, "upstream": -2.5},
    "gpu_in_chunks": {"tiling": GPU, "budget": 3 * BOTH_HEADS},
}


@pytest.mark.parametrize("way", [*WAYS, "formulas"])
@pytest.mark.parametrize("name", CASES)
def test_value_and_gradients_are_those_of_all_logits(name: str, way: str) -> None:
    """In chunks of any size, as on a GPU (all rows in their own order), and by the formulas of each term."""
    case = CASES[name]()
    options = {"terms": by_formulas(case.terms), "budget": 9 * BOTH_HEADS} if way == "formulas" else WAYS[way]
    case.assert_agrees(**options)


@pytest.mark.parametrize("name", ["pair", "cutoff_0.01", "top_8_at_3.7", "samples"])
def test_extreme_logits_stay_finite(name: str) -> None:
    case = CASES[name]()
    case.student = case.student._replace(rows=(case.student.rows.detach() * 1e4).requires_grad_())
    case.assert_agrees(relative=2e-3)  # fp32 itself knows logits of this size to 1e-3


@pytest.mark.parametrize(
    ("terms", "teacher"),
    [([Soft(), Mlm()], "head"), ([soft(2.0, 0.05)], "head"), ([Soft(), Mlm()], 4), ([Mlm(), LogitMse()], "head")],
)
def test_gradients_by_differences(terms: list[VocabularyTerm], teacher: Any) -> None:
    case = made(terms, teacher, rows=5, dtype=torch.float64, masked=0.5, vocab=13)
    assert torch.autograd.gradcheck(
        lambda *tensors: case.chunked(student=Head(*tensors), budget=2 * 13 * 16)[0], case.student[:3], fast_mode=True
    )
    case.assert_agrees(relative=1e-12)


# --- formats


@pytest.mark.parametrize("name", ["pair", "reverse", "jsd", "logit_mse_masked"])
def test_bf16_products_by_format_and_by_autocast_are_near(name: str) -> None:
    case = CASES[name]()
    want, _, references = case.exact()
    by_format = case.chunked(student=case.student._replace(dtype=torch.bfloat16), budget=7 * BOTH_HEADS)[0]
    with torch.autocast("cpu", torch.bfloat16):
        by_autocast = case.chunked(budget=7 * BOTH_HEADS)[0]
    for loss in (by_format, by_autocast):
        assert loss.dtype == torch.float32
        torch.testing.assert_close(loss.double(), want, rtol=1e-2, atol=0)
        for found, wanted in zip(gradients(loss, case.student), references, strict=True):
            assert found.dtype == torch.float32 and (found - wanted).norm() < 0.02 * wanted.norm()


def test_a_bf16_weight_and_rows_get_bf16_gradients() -> None:
    case = problem(dtype=torch.bfloat16)
    loss, _ = case.chunked(budget=7 * BOTH_HEADS)
    assert loss.dtype == torch.float32
    for found, wanted in zip(gradients(loss, case.student), case.exact()[2], strict=True):
        assert found.dtype == torch.bfloat16 and (found - wanted).norm() < 0.03 * wanted.norm()


def test_a_weight_that_is_rounded_already_is_not_rounded_again() -> None:
    case = problem()
    zeros = torch.zeros_like(case.student.weight, dtype=torch.bfloat16).detach()
    case.student = case.student._replace(dtype=torch.bfloat16, rounded=zeros)
    rows, weight, _ = gradients(case.chunked()[0], case.student)
    assert rows.abs().max() == 0 and weight.abs().max() > 0


# --- gradients through what surrounds it


def test_a_frozen_head_no_grad_and_a_second_backward() -> None:
    case = problem()
    frozen = case.student._replace(weight=case.student.weight.detach(), bias=None)
    case.chunked(student=frozen)[0].backward()
    assert case.student.rows.grad is not None and frozen.weight.grad is None
    with torch.no_grad():
        assert not case.chunked()[0].requires_grad
    with torch.inference_mode():  # as a live teacher gives it
        case.teacher = Head(*(tensor.clone() for tensor in case.teacher[:3]))
    loss = case.chunked()[0]
    first = torch.autograd.grad(loss, case.student[:3], retain_graph=True)
    torch.testing.assert_close(first, torch.autograd.grad(loss, case.student[:3]), rtol=0, atol=0)


class Scaled(VocabularyTerm):
    """A term with numbers of its own that are learned: a factor of each logit, and one that no row uses."""

    def __init__(self, positions: str) -> None:
        self.positions = positions
        self.module = nn.ParameterList([torch.linspace(0.5, 1.5, VOCAB), torch.ones(3)])
        self.module[1].requires_grad_(positions == "all")

    def losses(self, student: Tensor, teacher: Any, targets: Tensor) -> Tensor:
        return (student * self.module[0] - teacher).square().mean(-1)


@pytest.mark.parametrize("positions", ["all", "targets"])
@pytest.mark.parametrize("others", [[], [Mlm()], [LogitMse()]], ids=["alone", "beside_the_kernel", "beside_another"])
def test_the_module_of_a_term_is_trained_as_by_the_plain_losses(others: list[VocabularyTerm], positions: str) -> None:
    """In chunks, with the gradients of two micro-batches added up, both of which are read before the first backward."""
    term = Scaled(positions)
    terms, cases, scales = [*others, term], [problem(41), problem(17)], torch.linspace(0.2, 0.9, len(others) + 1)
    found = []
    for losses in (PlainLosses(terms, VOCAB), ChunkedLosses(terms, VOCAB, tiling=CPU._replace(budget=7 * BOTH_HEADS))):
        term.module.zero_grad()
        results = []
        for case in cases:
            student, teacher = (head._replace(dtype=torch.float32) for head in (case.student, case.teacher))
            results.append(losses(student, teacher, case.targets, scales)[0])
        (results[0] - 2.5 * results[1]).backward()
        found.append((torch.stack(results).detach(), term.module[0].grad.clone()))
    (want, reference), (got, mine) = found
    assert reference.abs().max() > 0.1
    torch.testing.assert_close(got, want, rtol=1e-5, atol=2e-5)
    torch.testing.assert_close(mine, reference, rtol=0, atol=5e-6 * reference.abs().max().item())


# --- what it keeps, and its kernel


@pytest.mark.parametrize("terms", [[Soft(), Mlm()], [LogitMse()]], ids=["by_hand", "by_formulas"])
def test_nothing_of_rows_by_vocabulary_is_kept_or_made(terms: list[VocabularyTerm]) -> None:
    """Autograd keeps gradients of the inputs' sizes and parts of a block, and no buffer exceeds the budget."""
    case, kept = problem(400), []
    case.terms = terms
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor.numel()) or tensor, lambda t: t):
        case.chunked()
    assert max(kept) <= max(case.student.weight.numel(), CPU.block // 4) < 400 * VOCAB
    largest = largest_allocation(lambda: case.chunked(budget=20 * BOTH_HEADS)[0].backward())
    assert largest <= max(20 * BOTH_HEADS, CPU.block, case.student.weight.numel() * 4) < 400 * VOCAB * 4


def test_a_class_of_a_users_may_compute_otherwise_than_what_it_inherits_from() -> None:
    terms = [Mlm(), LogitMse(), Soft(temperature=3.0)]
    assert by_hand(terms) == (terms[2], terms[0]) and by_hand(by_formulas(terms)) == (None, None)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a compiler")
@pytest.mark.parametrize("name", ["pair", "top_8_at_3.7", "samples"])
def test_compiled_gives_the_plain_result(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # falling back would warn
        for rows_per_chunk in (8, 41):
            CASES[name]().assert_agrees(budget=rows_per_chunk * BOTH_HEADS, compiled=True)
    assert compiled_kernel.works


@pytest.mark.parametrize(
    "error", [RuntimeError("no compiler found\nwith a long story"), torch.OutOfMemoryError("full")]
)
def test_without_a_compiler_it_runs_as_it_is_and_without_memory_it_does_not(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it is, it takes more memory, and the whole process would go on without compiling."""
    tries = []

    def broken(*_: object) -> Tensor:
        tries.append(1)
        raise error

    monkeypatch.setattr(compiled_kernel, "works", True)
    monkeypatch.setitem(vars(compiled_kernel), "function", broken)
    if isinstance(error, torch.OutOfMemoryError):
        with pytest.raises(torch.OutOfMemoryError):
            problem().chunked(compiled=True)
        assert compiled_kernel.works
        return
    with pytest.warns(UserWarning, match="without torch.compile: no compiler found$"):
        problem().assert_agrees(compiled=True, budget=2 * BOTH_HEADS)
    problem().assert_agrees(compiled=True)
    assert len(tries) == 1, "each try takes seconds"


def test_masked_soft_targets_leave_other_rows_alone_where_all_are_visited() -> None:
    """Rows that only another term of the objective reads, beside the losses over the vocabulary."""
    case = problem()
    case.terms = [Soft(positions=MASKED), Mlm()]
    losses = ChunkedLosses(case.terms, VOCAB, all_rows=True)
    loss, sums = losses(case.student, case.teacher, case.targets, case.scales.float())
    torch.testing.assert_close((loss.double(), sums.double()), case.exact()[:2], rtol=1e-5, atol=1e-4)
    assert (case.targets == NO_TARGET).any()
