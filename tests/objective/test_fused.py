"""The chunked loss against the plain losses on full logits: value, gradients, chunks, formats, and what it keeps."""

import shutil
import warnings

import pytest
import torch
from heads import BOTH_HEADS, VOCAB, Problem, assert_agrees, gradients, largest_allocation, problem
from torch import Tensor

from distill.models.language_model import Head
from distill.objective.chunked import CPU, GPU, compiled_kernel


@pytest.mark.parametrize("rows_per_chunk", [1, 7, 8, 41, 1000])
@pytest.mark.parametrize("rows", [0, 1, 2, 41])
def test_chunks_of_any_size_give_the_plain_result(rows: int, rows_per_chunk: int) -> None:
    assert_agrees(problem(rows), budget=rows_per_chunk * BOTH_HEADS)


@pytest.mark.parametrize("budget", [3 * BOTH_HEADS, GPU.budget])
@pytest.mark.parametrize("with_teacher", [True, False])
def test_the_tiling_of_a_gpu_gives_the_plain_result(with_teacher: bool, budget: int) -> None:
    """All rows in their own order, and products, gradients and losses of a chunk at once."""
    case = problem()
    case.teacher = case.teacher if with_teacher else None
    assert_agrees(case, tiling=GPU, budget=budget)


@pytest.mark.parametrize(("vocab", "width", "teacher_width"), [(30_522, 768, 768), (151_936, 896, 1_536)])
def test_a_chunk_on_a_gpu_computes_for_longer_than_it_reads_its_weights(
    vocab: int, width: int, teacher_width: int
) -> None:
    """By the roofline of an H100 in bf16, 989 TFLOP/s and 3.35 TB/s, for what each chunk reads and writes anew."""
    rows = GPU.budget // (2 * vocab * 2)
    products = 2 * rows * vocab * (3 * width + teacher_width) / 989e12
    weights = 2 * vocab * (2 * width + teacher_width)  # the student's head twice, the teacher's once
    gradient = vocab * width * (2 + 2 + 4 + 4)  # bf16 written and read, fp32 read and written
    assert products > (weights + gradient) / 3.35e12
    rows = CPU.budget // (2 * vocab * 2)
    assert 2 * rows * vocab * (3 * width + teacher_width) / 989e12 < (weights + gradient) / 3.35e12


@pytest.mark.parametrize("cutoff", [0.0, 1e-4, 1e-2, 0.3, 2.0])
@pytest.mark.parametrize("upstream", [1.0, -2.5])
def test_cutoff_and_upstream_gradient(cutoff: float, upstream: float) -> None:
    case = problem()
    case.cutoff = cutoff
    assert_agrees(case, upstream=upstream, budget=10 * BOTH_HEADS)


@pytest.mark.parametrize("temperature", [1.0, 2.0, 3.7])
@pytest.mark.parametrize("masked", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("with_teacher", [True, False])
def test_rows_carry_any_mixture_of_terms(masked: float, with_teacher: bool, temperature: float) -> None:
    case = problem(masked=masked)
    case.teacher = case.teacher if with_teacher else None
    case.temperature = temperature
    assert_agrees(case, budget=10 * BOTH_HEADS)


@pytest.mark.parametrize("kept", [1, 8, 128, VOCAB - 1])
@pytest.mark.parametrize("temperature", [1.0, 2.0, 3.7])
def test_a_teacher_known_by_its_largest_entries(kept: int, temperature: float) -> None:
    case = problem()
    case.kept, case.temperature = kept, temperature
    assert_agrees(case, upstream=-2.5, budget=10 * BOTH_HEADS)


def test_a_teacher_known_by_its_largest_entries_alone() -> None:
    """Without masked words, without rows, at extreme logits; gradients by differences."""
    for rows in (0, 1, 41):
        case = problem(rows)
        case.targets, case.kept = None, 8
        assert_agrees(case)
    case.student = case.student._replace(rows=(case.student.rows.detach() * 1e4).requires_grad_())
    assert_agrees(case, relative=2e-3)
    case = problem(5, torch.float64, masked=0.5, vocab=13)
    case.kept = 4
    assert torch.autograd.gradcheck(lambda *t: case.fused(student=Head(*t), budget=2 * 13 * 16)[0], case.student[:3])
    assert_agrees(case, relative=1e-13)


def test_almost_all_entries_give_the_result_of_the_live_teacher() -> None:
    case = problem()
    live, live_sums = case.plain()
    case.kept = VOCAB - 1
    loss, sums = case.fused()
    torch.testing.assert_close((loss, sums), (live, live_sums), rtol=2e-3, atol=1e-4)
    for mine, reference in zip(gradients(loss, case.student), gradients(live, case.student), strict=True):
        assert (mine - reference).norm() < 2e-3 * reference.norm()


def test_terms_and_bias_may_be_absent() -> None:
    case = problem(bias=False)
    assert_agrees(case)
    case.teacher = None
    assert_agrees(case, budget=4 * BOTH_HEADS)
    case.targets = None
    assert case.fused()[0].item() == 0 and all((g == 0).all() for g in gradients(case.fused()[0], case.student))
    case = problem()
    case.targets = None
    assert_agrees(case)


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("cutoff", [0.0, 0.05])
def test_gradients_by_differences(rows: int, cutoff: float) -> None:
    case = problem(rows, torch.float64, masked=0.5, vocab=13)
    case.cutoff = cutoff

    def loss(*tensors: Tensor) -> Tensor:
        return case.fused(student=Head(*tensors), budget=2 * 13 * 16)[0]

    assert torch.autograd.gradcheck(loss, case.student[:3])
    assert_agrees(case, relative=1e-13)


def test_bf16_matrix_operations_by_dtype_and_by_autocast() -> None:
    case = problem()
    want, _ = case.plain()
    references = gradients(want, case.student)
    by_dtype = case.fused(student=case.student._replace(dtype=torch.bfloat16), budget=7 * BOTH_HEADS)[0]
    with torch.autocast("cpu", torch.bfloat16):
        by_autocast = case.fused(budget=7 * BOTH_HEADS)[0]
    for loss in (by_dtype, by_autocast):
        assert loss.dtype == torch.float32
        torch.testing.assert_close(loss, want, rtol=1e-2, atol=0)
        for mine, reference in zip(gradients(loss, case.student), references, strict=True):
            assert mine.dtype == torch.float32
            assert (mine - reference).norm() < 0.02 * reference.norm()


def test_a_bf16_weight_and_rows_get_bf16_gradients() -> None:
    case = problem(dtype=torch.bfloat16)
    exact = Problem(*(Head(*(x.double() for x in head[:3])) for head in (case.student, case.teacher)), case.targets)
    loss, _ = case.fused(budget=7 * BOTH_HEADS)
    assert loss.dtype == torch.float32
    for mine, reference in zip(gradients(loss, case.student), gradients(exact.plain()[0], case.student), strict=True):
        assert mine.dtype == torch.bfloat16
        assert (mine - reference).norm() < 0.03 * reference.norm()


def test_the_heads_may_have_formats_of_their_own() -> None:
    case = problem()
    case.teacher = case.teacher._replace(dtype=torch.bfloat16)
    want = case.plain()[0]
    torch.testing.assert_close(case.fused()[0], want, rtol=1e-2, atol=0)


def test_a_tied_weight_gets_both_gradients() -> None:
    case = problem()
    ids = torch.randint(VOCAB, (41,))
    weight, bias = case.student.weight, case.student.bias
    results = []
    for path in (case.plain, lambda: case.fused()):
        case.student = Head(weight[ids].tanh(), weight, bias)
        results.append(torch.autograd.grad(path()[0], weight)[0])
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-6)


def test_a_frozen_head_and_no_grad() -> None:
    case = problem()
    frozen = case.student._replace(weight=case.student.weight.detach(), bias=None)
    rows_only = case.fused(student=frozen)[0]
    rows_only.backward()
    assert case.student.rows.grad is not None and frozen.weight.grad is None
    with torch.no_grad():
        loss, sums = case.fused()
    assert not loss.requires_grad
    torch.testing.assert_close((loss, sums), case.plain(), rtol=1e-5, atol=1e-6)


def test_a_teacher_under_inference_mode_can_be_learnt_from() -> None:
    case = problem()
    with torch.inference_mode():
        case.teacher = Head(*(tensor.clone() for tensor in case.teacher[:3]))
    case.fused()[0].backward()
    assert case.student.weight.grad is not None


def test_backward_twice_gives_the_same() -> None:
    case = problem()
    loss = case.fused()[0]
    first = torch.autograd.grad(loss, case.student[:3], retain_graph=True)
    second = torch.autograd.grad(loss, case.student[:3])
    torch.testing.assert_close(first, second, rtol=0, atol=0)


def test_extreme_logits_stay_finite() -> None:
    case = problem(5)
    case.student = case.student._replace(rows=(case.student.rows.detach() * 1e4).requires_grad_())
    for cutoff in (0.0, 1e-3):
        case.cutoff = cutoff
        assert_agrees(case, relative=2e-3)  # fp32 itself knows logits of this size to 1e-3


def test_nothing_of_rows_by_vocabulary_is_kept_or_made() -> None:
    """Autograd keeps only gradients of the inputs' sizes, and no buffer is larger than the budget allows."""
    case = problem(200)
    kept: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        case.fused()
    assert max(kept) <= case.student.weight.numel() < 200 * VOCAB
    assert sum(kept) <= sum(tensor.numel() for tensor in case.student[:3]) + 2
    largest = largest_allocation(lambda: case.fused(budget=20 * BOTH_HEADS)[0].backward())
    limit = max(20 * BOTH_HEADS, CPU.block, case.student.weight.numel() * 4)
    assert largest <= limit < 200 * VOCAB * 4 * 2


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="no compiler")
def test_compiled_gives_the_plain_result() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # falling back would be said by a warning
        for rows_per_chunk in (8, 41):
            assert_agrees(problem(), budget=rows_per_chunk * BOTH_HEADS, compiled=True)
        case = problem()
        case.kept = 8
        assert_agrees(case, budget=8 * BOTH_HEADS, compiled=True)


def test_without_a_compiler_it_runs_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    tries = []

    def broken(*_: object) -> Tensor:
        tries.append(1)
        raise RuntimeError("no compiler found\nwith a long story")

    monkeypatch.setattr(compiled_kernel, "works", True)
    monkeypatch.setattr(compiled_kernel, "function", broken)
    with pytest.warns(UserWarning, match="without torch.compile: no compiler found$"):
        assert_agrees(problem(), compiled=True, budget=2 * BOTH_HEADS)
    assert_agrees(problem(), compiled=True)
    assert len(tries) == 1, "each try takes seconds"


def test_a_compiled_block_that_has_no_memory_is_not_run_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """That takes more memory, and the whole process would go on without compiling."""

    def full(*_: object) -> Tensor:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(compiled_kernel, "works", True)
    monkeypatch.setattr(compiled_kernel, "function", full)
    with pytest.raises(torch.OutOfMemoryError):
        problem().fused(compiled=True)
    assert compiled_kernel.works


def test_a_weight_that_is_rounded_already_is_not_rounded_again() -> None:
    case = problem(dtype=torch.float32)
    zeros = torch.zeros_like(case.student.weight, dtype=torch.bfloat16).detach()
    case.student = case.student._replace(dtype=torch.bfloat16, rounded=zeros)
    loss, _ = case.fused()
    rows, weight, _ = gradients(loss, case.student)
    assert rows.abs().max() == 0 and weight.abs().max() > 0
