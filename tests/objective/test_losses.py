"""The loss terms against loops in float64: values, gradients, odd shapes, extreme logits, the tail bucket."""

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from distill.objective import losses
from distill.teacher.distributions import top_k_log_probs

SHAPES = [(1, 2), (3, 7), (41, 1271)]
CUTOFFS = [0.0, 1e-3, 0.05, 0.3, 2.0]  # of nothing cut to everything cut


def soft_loop(student: Tensor, teacher: Tensor, temperature: float, cutoff: float) -> tuple[Tensor, Tensor]:
    """Values [N] and the gradient [N, V] of their sum for the student's logits, entry by entry, from the formula."""
    values, gradients = torch.zeros(len(student), dtype=torch.float64), torch.zeros(student.shape, dtype=torch.float64)
    for n, (s, t) in enumerate(zip(student.double().tolist(), teacher.double().tolist(), strict=True)):
        p, q = distribution(t, temperature), distribution(s, temperature)
        cut = [x < cutoff for x in p]
        tail_p = math.fsum(x for x, c in zip(p, cut, strict=True) if c)
        tail_q = math.fsum(x for x, c in zip(q, cut, strict=True) if c)
        terms = [x * math.log(x / y) for x, y, c in zip(p, q, cut, strict=True) if not c and x > 0]
        tail = tail_p * math.log(tail_p / tail_q) if tail_p > 0 else 0.0
        values[n] = temperature**2 * (math.fsum(terms) + tail)
        for v, (x, y, c) in enumerate(zip(p, q, cut, strict=True)):
            gradients[n, v] = temperature * (y - (tail_p * y / tail_q if c else x))
    return values, gradients


def topk_loop(student: Tensor, ids: Tensor, log_probs: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """The same for a teacher of whom the kept entries and the mass of all others are known."""
    values, gradients = torch.zeros(len(student), dtype=torch.float64), torch.zeros(student.shape, dtype=torch.float64)
    rows = zip(student.double().tolist(), ids.tolist(), log_probs.double().tolist(), strict=True)
    for n, (s, kept, logs) in enumerate(rows):
        whole = math.fsum(math.exp(x) for x in logs)
        p = dict(zip(kept, (math.exp(x) / whole for x in logs), strict=False))
        q, tail_p = distribution(s, temperature), math.exp(logs[-1]) / whole
        tail_q = math.fsum(y for v, y in enumerate(q) if v not in p)
        inside = math.fsum(x * math.log(x / q[v]) for v, x in p.items() if x > 0)
        values[n] = temperature**2 * (inside + (tail_p * math.log(tail_p / tail_q) if tail_p > 0 else 0))
        for v, y in enumerate(q):
            gradients[n, v] = temperature * (y - (p[v] if v in p else tail_p * y / tail_q))
    return values, gradients


def distribution(logits: list[float], temperature: float) -> list[float]:
    top = max(logits)
    powers = [math.exp((x - top) / temperature) for x in logits]
    whole = math.fsum(powers)
    return [x / whole for x in powers]


def mlm_loop(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    values, gradients = torch.zeros(len(logits), dtype=torch.float64), torch.zeros(logits.shape, dtype=torch.float64)
    for n, (row, target) in enumerate(zip(logits.double().tolist(), targets.tolist(), strict=True)):
        if target == -100:
            continue
        top = max(row)
        values[n] = top + math.log(math.fsum(math.exp(x - top) for x in row)) - row[target]
        gradients[n] = torch.tensor(distribution(row, 1.0), dtype=torch.float64)
        gradients[n, target] -= 1
    return values, gradients


def cosine_loop(student: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor]:
    values, gradients = torch.zeros(len(student), dtype=torch.float64), torch.zeros(student.shape, dtype=torch.float64)
    for n, (s, t) in enumerate(zip(student.double().tolist(), teacher.double().tolist(), strict=True)):
        dot = math.fsum(a * b for a, b in zip(s, t, strict=True))
        norm_s, norm_t = math.hypot(*s), math.hypot(*t)
        values[n] = 1 - dot / (norm_s * norm_t)
        for h, (a, b) in enumerate(zip(s, t, strict=True)):
            gradients[n, h] = -(b / (norm_s * norm_t) - dot * a / (norm_s**3 * norm_t))
    return values, gradients


def agree(term: Callable[[Tensor], Tensor], inputs: Tensor, want: tuple[Tensor, Tensor], relative: float) -> None:
    """`term`'s values, and its gradient under unequal upstream gradients, are those wanted."""
    inputs = inputs.detach().requires_grad_()
    values = term(inputs)
    assert values.shape == want[0].shape and values.dtype == (
        torch.float64 if inputs.dtype == torch.float64 else torch.float32
    )
    upstream = torch.linspace(-3, 5, len(values), dtype=values.dtype)
    values.backward(upstream)
    torch.testing.assert_close(values.double(), want[0], rtol=relative, atol=relative)
    wanted = want[1] * upstream[:, None]
    atol = relative * max(1.0, wanted.abs().max().item()) if len(values) else 0
    torch.testing.assert_close(inputs.grad.double(), wanted, rtol=relative, atol=atol)


def draw(*shape: int, dtype: torch.dtype = torch.float64, scale: float = 3.0) -> Tensor:
    return (torch.randn(*shape, dtype=torch.float64) * scale).to(dtype)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("cutoff", CUTOFFS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_soft_is_the_formula(dtype: torch.dtype, shape: tuple[int, int], cutoff: float) -> None:
    student, teacher = draw(*shape, dtype=dtype), draw(*shape, dtype=dtype)
    for temperature in (1.0, 2.0, 3.7):
        want = soft_loop(student, teacher, temperature, cutoff)
        relative = 1e-11 if dtype == torch.float64 else 2e-5
        agree(lambda x, t=temperature: losses.soft(x, teacher, t, cutoff), student, want, relative)


@pytest.mark.parametrize("kept", [1, 3, -1])
@pytest.mark.parametrize("shape", [(1, 2), (3, 7), (13, 301)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_soft_topk_is_the_formula(dtype: torch.dtype, shape: tuple[int, int], kept: int) -> None:
    student, teacher = draw(*shape, dtype=dtype), draw(*shape, dtype=dtype)
    kept = min(kept % shape[1], shape[1] - 1)
    for temperature in (1.0, 2.0, 3.7):
        ids, exact = top_k_log_probs(teacher, kept, temperature)
        for log_probs in (exact, exact.half()):
            want = topk_loop(student, ids, log_probs, temperature)
            relative = 1e-11 if dtype == torch.float64 else 2e-5
            term = partial(losses.soft_topk, ids=ids.int(), log_probs=log_probs, temperature=temperature)
            agree(term, student, want, relative)


def test_top_k_is_sorted_and_complete() -> None:
    teacher = draw(41, 1271, dtype=torch.float32)
    ids, log_probs = top_k_log_probs(teacher, 8, 2.0)
    probabilities = (teacher / 2).softmax(-1)
    assert ids.shape == (41, 8) and log_probs.shape == (41, 9) and log_probs.dtype == torch.float32
    torch.testing.assert_close(log_probs[:, :8].exp(), probabilities.sort(descending=True)[0][:, :8])
    torch.testing.assert_close(probabilities.gather(1, ids), log_probs[:, :8].exp())
    torch.testing.assert_close(log_probs.exp().sum(-1), torch.ones(41))


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_soft_topk_with_all_but_one_entry_is_soft(temperature: float) -> None:
    """The bucket of one entry is that entry; rounding to float16 costs no more than its digits."""
    teacher = draw(41, 97, dtype=torch.float32)
    ids, log_probs = top_k_log_probs(teacher, 96, temperature)
    results = []
    for term in (
        lambda x: losses.soft(x, teacher, temperature),
        lambda x: losses.soft_topk(x, ids, log_probs, temperature),
        lambda x: losses.soft_topk(x, ids, log_probs.half(), temperature),
    ):
        torch.manual_seed(1)
        student = draw(41, 97, dtype=torch.float32).requires_grad_()
        values = term(student)
        values.sum().backward()
        results.append((values.detach(), student.grad))
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(results[2], results[0], rtol=3e-3, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", SHAPES)
def test_mlm_is_the_formula(shape: tuple[int, int], dtype: torch.dtype) -> None:
    logits, targets = draw(*shape, dtype=dtype), torch.randint(shape[1], shape[:1])
    targets[1::3] = -100
    agree(lambda x: losses.mlm(x, targets), logits, mlm_loop(logits, targets), 1e-11 if dtype.itemsize == 8 else 1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", SHAPES)
def test_cosine_is_the_formula(shape: tuple[int, int], dtype: torch.dtype) -> None:
    student, teacher = draw(*shape, dtype=dtype), draw(*shape, dtype=dtype)
    want = cosine_loop(student, teacher)
    agree(lambda x: losses.cosine(x, teacher), student, want, 1e-11 if dtype.itemsize == 8 else 1e-5)


def test_bf16_is_computed_in_fp32() -> None:
    student, teacher = draw(5, 33, dtype=torch.bfloat16), draw(5, 33, dtype=torch.bfloat16)
    targets = torch.randint(33, (5,))
    for got, want in [
        (losses.soft(student, teacher, 2.0, 0.01), soft_loop(student, teacher, 2.0, 0.01)[0]),
        (losses.mlm(student, targets), mlm_loop(student, targets)[0]),
        (losses.cosine(student, teacher), cosine_loop(student, teacher)[0]),
    ]:
        assert got.dtype == torch.float32
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("cutoff", CUTOFFS)
def test_gradients_by_differences(cutoff: float) -> None:
    student, teacher = draw(4, 9, scale=1.0).requires_grad_(), draw(4, 9, scale=1.0)
    assert torch.autograd.gradcheck(lambda x: losses.soft(x, teacher, 1.7, cutoff), student)
    kept = top_k_log_probs(teacher, 3, 1.7)
    assert torch.autograd.gradcheck(lambda x: losses.soft_topk(x, *kept, 1.7), student)
    assert torch.autograd.gradcheck(lambda x: losses.cosine(x, teacher), student)
    assert torch.autograd.gradcheck(lambda x: losses.mlm(x, torch.tensor([0, -100, 8, 3])), student)


@pytest.mark.parametrize("cutoff", [0.0, 1e-3])
def test_no_rows(cutoff: float) -> None:
    empty = torch.zeros(0, 7, requires_grad=True)
    targets = torch.zeros(0, dtype=torch.int64)
    kept = top_k_log_probs(empty.detach(), 3, 2.0)
    soft, topk = losses.soft(empty, empty.detach(), 2.0, cutoff), losses.soft_topk(empty, *kept, 2.0)
    for values in (soft, topk, losses.mlm(empty, targets)):
        assert values.shape == (0,)
        values.sum().backward()
    assert losses.cosine(empty, empty).shape == (0,)
    assert empty.grad.shape == (0, 7)


@pytest.mark.parametrize("cutoff", CUTOFFS)
def test_extreme_logits_stay_finite(cutoff: float) -> None:
    """Teacher and student sure of different entries: the value is that of the gap, not inf, NaN or a clamp's."""
    student = torch.zeros(4, 6).index_fill_(1, torch.tensor([1]), 1e4).requires_grad_()
    teacher = torch.zeros(4, 6).index_fill_(1, torch.tensor([4]), 1e4)
    values = losses.soft(student, teacher, 2.0, cutoff)
    (7 * values.sum()).backward()
    assert student.grad.isfinite().all()
    torch.testing.assert_close(values, torch.full((4,), 0.0 if cutoff > 1 else 4 * 5e3))
    assert losses.mlm(student, torch.full((4,), 3)).tolist() == [1e4] * 4


def test_a_tiny_tail_keeps_its_digits() -> None:
    """The student's tail mass, exp(-200), is far below fp32's range; its logarithm is not."""
    teacher = torch.tensor([[0.0, -3.0, -3.0]])
    student = torch.tensor([[0.0, -200.0, -200.0]], requires_grad=True)
    tail = 2 * math.exp(-3) / (1 + 2 * math.exp(-3))
    values = losses.soft(student, teacher, 1.0, 0.1)
    want = tail * (math.log(tail) - (math.log(2) - 200)) + (1 - tail) * math.log(1 - tail)
    assert values.item() == pytest.approx(want, rel=1e-6)
    values.backward()
    torch.testing.assert_close(student.grad, torch.tensor([[tail, -tail / 2, -tail / 2]]))


def test_a_tiny_tail_of_kept_entries_keeps_its_digits() -> None:
    teacher, student = torch.tensor([[0.0, -3.0, -3.0]]), torch.tensor([[0.0, -200.0, -200.0]], requires_grad=True)
    values = losses.soft_topk(student, *top_k_log_probs(teacher, 1, 1.0), 1.0)
    values.backward()
    torch.testing.assert_close(values.detach(), losses.soft(student.detach(), teacher, 1.0, 0.1))
    tail = 2 * math.exp(-3) / (1 + 2 * math.exp(-3))
    torch.testing.assert_close(student.grad, torch.tensor([[tail, -tail / 2, -tail / 2]]))


def test_the_tail_bucket_is_neutral_where_nothing_or_everything_is_cut() -> None:
    student, teacher = draw(5, 11, dtype=torch.float32).requires_grad_(), draw(5, 11, dtype=torch.float32)
    uncut = losses.soft(student, teacher, 2.0)
    torch.testing.assert_close(losses.soft(student, teacher, 2.0, 1e-30), uncut)
    everything = losses.soft(student, teacher, 2.0, 1.5)
    everything.sum().backward()
    assert everything.tolist() == [0] * 5 and student.grad.abs().max() < 1e-6
    assert (losses.soft(student, teacher, 2.0, 0.05) < uncut).all()  # merging entries can only lose information


def test_a_teacher_under_inference_mode_can_be_learnt_from() -> None:
    student = draw(3, 8, dtype=torch.float32).requires_grad_()
    with torch.inference_mode():
        teacher = draw(3, 8, dtype=torch.float32)
    for temperature in (1.0, 2.0):
        for cutoff in CUTOFFS:
            losses.soft(student, teacher, temperature, cutoff).sum().backward()
    losses.cosine(student, teacher).sum().backward()


def test_identical_models_have_no_loss() -> None:
    logits = draw(6, 50, dtype=torch.float32).requires_grad_()
    loss = losses.soft(logits, logits.detach(), 2.0, 0.01).sum() + losses.cosine(logits, logits.detach()).sum()
    loss.backward()
    assert abs(loss.item()) < 1e-5 and logits.grad.abs().max() < 1e-6
