"""The formulas of the losses against loops in float64: values, gradients, odd shapes, extreme logits, tail buckets."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from distill.objective import losses
from distill.teacher.distributions import Samples, top_k_log_probs

CUTOFFS = [0.0, 1e-3, 0.05, 0.3, 2.0]  # of nothing cut to everything cut
Row = tuple[float, list[float]]  # a position's loss, and its gradient for the student's logits
Formula = tuple[Callable[[Tensor], Tensor], Callable[[int, list[float]], Row]]  # of the student; of position and logits


def distribution(logits: list[float], temperature: float) -> list[float]:
    powers = [math.exp((x - max(logits)) / temperature) for x in logits]
    return [x / math.fsum(powers) for x in powers]


def kl(p: list[float], q: list[float]) -> float:
    return math.fsum(x * math.log(x / y) for x, y in zip(p, q, strict=True) if x > 0)


def in_buckets(s: list[float], temperature: float, p: dict[int, float], tail_p: float) -> Row:
    """A teacher of whom some entries are known, and the mass of all others."""
    q = distribution(s, temperature)
    tail_q = math.fsum(y for v, y in enumerate(q) if v not in p)
    inside = math.fsum(x * math.log(x / q[v]) for v, x in p.items() if x > 0)
    value = inside + (tail_p * math.log(tail_p / tail_q) if tail_p > 0 else 0.0)
    gradient = [temperature * (y - (p[v] if v in p else tail_p * y / tail_q)) for v, y in enumerate(q)]
    return temperature**2 * value, gradient


def against(loss: Callable[[Tensor, Tensor], Tensor], row: Callable[[list[float], list[float]], Row]) -> Any:
    """A loss between the logits of two models, and its loop, of the teacher."""
    return lambda teacher: (lambda student: loss(student, teacher), lambda n, s: row(s, teacher[n].tolist()))


def soft(temperature: float, cutoff: float = 0.0) -> Callable[[Tensor], Formula]:
    def row(s: list[float], t: list[float]) -> Row:
        p = distribution(t, temperature)
        kept = {v: x for v, x in enumerate(p) if x >= cutoff}
        return in_buckets(s, temperature, kept, math.fsum(x for x in p if x < cutoff))

    return against(lambda student, teacher: losses.soft(student, teacher, temperature, cutoff), row)


def soft_topk(temperature: float, kept: int, rounded: bool = False) -> Callable[[Tensor], Formula]:
    def formula(teacher: Tensor) -> Formula:
        ids, log_probs = top_k_log_probs(teacher, min(kept, teacher.shape[1] - 1), temperature)
        log_probs = log_probs.half() if rounded else log_probs

        def row(n: int, s: list[float]) -> Row:
            masses = [math.exp(x) for x in log_probs[n].tolist()]
            *inside, tail = (x / math.fsum(masses) for x in masses)
            return in_buckets(s, temperature, dict(zip(ids[n].tolist(), inside, strict=True)), tail)

        return lambda student: losses.soft_topk(student, ids.int(), log_probs, temperature), row

    return formula


def soft_sampled(temperature: float) -> Callable[[Tensor], Formula]:
    def formula(teacher: Tensor) -> Formula:
        ids = torch.randint(teacher.shape[1], (len(teacher), 5))  # one may be there twice
        weights, entropy = torch.rand(len(teacher), 5).to(teacher.dtype), -torch.rand(len(teacher), 1).to(teacher.dtype)

        def row(n: int, s: list[float]) -> Row:
            q, gradient = distribution(s, temperature), [0.0] * len(s)
            gradient = [temperature * float(weights[n].double().sum()) * y for y in q]
            value = float(entropy[n])
            for v, w in zip(ids[n].tolist(), weights[n].tolist(), strict=True):
                value -= w * math.log(q[v])
                gradient[v] -= temperature * w
            return temperature**2 * value, gradient

        samples = Samples(ids, weights, entropy)
        return lambda student: losses.soft_sampled(student, *samples, temperature), row

    return formula


def divergence(temperature: float, beta: float) -> Callable[[Tensor], Formula]:
    def row(s: list[float], t: list[float]) -> Row:
        """With m = beta p + (1 - beta) q; the gradient is T (1 - beta) q (log(q / m) - KL(q || m))."""
        p, q = distribution(t, temperature), distribution(s, temperature)
        if beta == 0:
            return temperature**2 * kl(p, q), [temperature * (y - x) for x, y in zip(p, q, strict=True)]
        m = p if beta == 1 else [beta * x + (1 - beta) * y for x, y in zip(p, q, strict=True)]
        factor = 1.0 if beta == 1 else 1 - beta
        logs = [math.log(y / z) if y > 0 else 0.0 for y, z in zip(q, m, strict=True)]
        gradient = [temperature * factor * y * (log - kl(q, m)) for y, log in zip(q, logs, strict=True)]
        of_teacher = 0.0 if beta == 1 else beta * kl(p, m)
        return temperature**2 * (of_teacher + factor * kl(q, m)), gradient

    return against(lambda student, teacher: losses.divergence(student, teacher, temperature, beta), row)


def logit_mse(center: bool) -> Callable[[Tensor], Formula]:
    def row(s: list[float], t: list[float]) -> Row:
        d = [a - b for a, b in zip(s, t, strict=True)]
        d = [x - math.fsum(d) / len(d) for x in d] if center else d
        return math.fsum(x * x for x in d) / len(d), [2 * x / len(d) for x in d]

    return against(lambda student, teacher: losses.logit_mse(student, teacher, center), row)


def mlm(teacher: Tensor) -> Formula:
    targets = torch.randint(teacher.shape[1], teacher.shape[:1])
    targets[1::3] = -100

    def row(n: int, s: list[float]) -> Row:
        target, q = int(targets[n]), distribution(s, 1.0)
        if target == -100:
            return 0.0, [0.0] * len(s)
        log_sum = max(s) + math.log(math.fsum(math.exp(x - max(s)) for x in s))
        return log_sum - s[target], [y - (v == target) for v, y in enumerate(q)]

    return lambda student: losses.mlm(student, targets), row


def cosine(s: list[float], t: list[float]) -> Row:
    dot, norm_s, norm_t = math.fsum(a * b for a, b in zip(s, t, strict=True)), math.hypot(*s), math.hypot(*t)
    gradient = [-(b / (norm_s * norm_t) - dot * a / (norm_s**3 * norm_t)) for a, b in zip(s, t, strict=True)]
    return 1 - dot / (norm_s * norm_t), gradient


FORMULAS: dict[str, Callable[[Tensor], Formula]] = {
    **{f"soft-{cutoff:g}": soft(2.0, cutoff) for cutoff in CUTOFFS},
    "soft-cold": soft(1.0),
    "soft-hot": soft(3.7, 0.05),
    "topk-1": soft_topk(2.0, 1),
    "topk-3": soft_topk(1.0, 3),
    "topk-rounded": soft_topk(3.7, 3, rounded=True),
    "topk-all": soft_topk(2.0, 10_000),
    "sampled": soft_sampled(2.0),
    "reverse": divergence(2.0, 1.0),
    "reverse-cold": divergence(1.0, 1.0),
    "forward": divergence(2.0, 0.0),
    "jsd": divergence(2.0, 0.5),
    "jsd-near-the-teacher": divergence(3.7, 0.9),
    "jsd-near-the-student": divergence(1.0, 0.1),
    "logit-mse": logit_mse(False),
    "logit-mse-centered": logit_mse(True),
    "mlm": mlm,
    "cosine": against(losses.cosine, cosine),
}
every_formula = pytest.mark.parametrize("name", FORMULAS)


def normal(*shape: int, scale: float = 3.0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64) * scale


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@every_formula
@pytest.mark.parametrize("shape", [(0, 7), (1, 2), (3, 7), (13, 301)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_value_and_gradient_are_those_of_the_formula(name: str, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    """Under unequal upstream gradients; what comes in bf16 is computed in fp32."""
    accurate = torch.float64 if dtype == torch.float64 else torch.float32
    student, teacher = normal(*shape).to(dtype).requires_grad_(), normal(*shape).to(dtype)
    loss, row = FORMULAS[name](teacher)
    values, upstream = loss(student), torch.linspace(-3, 5, shape[0], dtype=accurate)
    assert values.shape == shape[:1] and values.dtype == accurate
    values.backward(upstream)
    rows = [row(n, s) for n, s in enumerate(student.double().tolist())]
    relative = 1e-11 if dtype == torch.float64 else 3e-5
    wanted = torch.tensor([value for value, _ in rows], dtype=torch.float64)
    torch.testing.assert_close(values.double(), wanted, rtol=relative, atol=relative)
    gradient = torch.tensor([gradient for _, gradient in rows], dtype=torch.float64).reshape(shape) * upstream[:, None]
    largest = max(1.0, float(gradient.abs().max())) if len(gradient) else 1.0
    relative = 1e-2 if dtype == torch.bfloat16 else relative  # the gradient has the student's format
    torch.testing.assert_close(student.grad.double(), gradient, rtol=relative, atol=relative * largest)


@every_formula
def test_gradients_by_differences(name: str) -> None:
    student, (loss, _) = normal(4, 9, scale=1.0).requires_grad_(), FORMULAS[name](normal(4, 9, scale=1.0))
    assert torch.autograd.gradcheck(loss, student)


@every_formula
def test_logits_that_are_sure_of_different_entries_stay_finite(name: str) -> None:
    """Of a teacher that inference mode made; targets and samples are read from files."""
    with torch.inference_mode(name not in ("mlm", "sampled")):
        loss, _ = FORMULAS[name](torch.tensor([[-3e4, 0.0, 3e4], [-3e4, 0.0, 3e4]]))
    student = torch.tensor([[3e4, 0.0, -3e4], [-3e4, 0.0, 3e4]]).requires_grad_()
    values = loss(student)
    values.sum().backward()
    assert values.isfinite().all() and student.grad.isfinite().all()


@pytest.mark.parametrize("cutoff", CUTOFFS)
def test_the_value_of_a_huge_gap_is_not_clamped(cutoff: float) -> None:
    student, teacher = (torch.zeros(4, 6).index_fill_(1, torch.tensor([i]), 1e4) for i in (1, 4))
    values = losses.soft(student, teacher, 2.0, cutoff)
    torch.testing.assert_close(values, torch.full((4,), 0.0 if cutoff > 1 else 4 * 5e3))
    assert losses.mlm(student, torch.full((4,), 3)).tolist() == [1e4] * 4


@pytest.mark.parametrize("way", ["cutoff", "topk"])
def test_a_tiny_tail_keeps_its_digits(way: str) -> None:
    """The student's tail mass, exp(-200), is far below fp32's range; its logarithm is not."""
    teacher, student = torch.tensor([[0.0, -3.0, -3.0]]), torch.tensor([[0.0, -200.0, -200.0]], requires_grad=True)
    loss, _ = (soft(1.0, 0.1) if way == "cutoff" else soft_topk(1.0, 1))(teacher)
    values = loss(student)
    values.backward()
    tail = 2 * math.exp(-3) / (1 + 2 * math.exp(-3))
    want = tail * (math.log(tail) - (math.log(2) - 200)) + (1 - tail) * math.log(1 - tail)
    assert values.item() == pytest.approx(want, rel=1e-6)
    torch.testing.assert_close(student.grad, torch.tensor([[tail, -tail / 2, -tail / 2]]))


def test_all_but_one_entry_rounded_cost_no_more_than_their_digits() -> None:
    student, teacher = normal(41, 97).float(), normal(41, 97).float()
    ids, log_probs = top_k_log_probs(teacher, 96, 2.0)
    found = losses.soft_topk(student, ids, log_probs.half(), 2.0)
    torch.testing.assert_close(found, losses.soft(student, teacher, 2.0), rtol=3e-3, atol=1e-3)
