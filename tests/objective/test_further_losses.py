"""Reverse KL, Jensen-Shannon and squared error of logits against loops in float64, alone and as terms of a run."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import tiny
import torch
from heads import BOTH_HEADS, VOCAB, gradients, problem
from naive import attention_of, targets_of
from plain_losses import PlainLosses
from tiny import named_terms
from torch import Tensor
from torch.nn.functional import linear

from distill.config.objective import WeightSchedule
from distill.objective import losses
from distill.objective.chunked import CPU, NO_TARGET, ChunkedLosses
from distill.objective.terms import ALL, VocabularyTerm
from distill.objective.terms._distributions import SoftPositions
from distill.objective.terms.jsd import Jsd
from distill.objective.terms.logit_mse import LogitMse
from distill.objective.terms.mlm import Mlm
from distill.objective.terms.reverse_kl import ReverseKl
from distill.objective.terms.soft import Soft

Row = tuple[float, list[float]]  # a position's loss, and its gradient for the student's logits


def distribution(logits: list[float], temperature: float) -> list[float]:
    top = max(logits)
    powers = [math.exp((x - top) / temperature) for x in logits]
    return [x / math.fsum(powers) for x in powers]


def jensen_shannon_row(student: list[float], teacher: list[float], temperature: float, beta: float) -> Row:
    """With m = beta p + (1 - beta) q, entry by entry; the gradient is T (1 - beta) q (log(q / m) - KL(q || m))."""
    p, q = distribution(teacher, temperature), distribution(student, temperature)
    m = [beta * x + (1 - beta) * y for x, y in zip(p, q, strict=True)]
    of_teacher = math.fsum(x * math.log(x / z) for x, z in zip(p, m, strict=True) if x > 0)
    of_student = math.fsum(y * math.log(y / z) for y, z in zip(q, m, strict=True) if y > 0)
    gradient = [
        temperature * (1 - beta) * y * (math.log(y / z) - of_student) if y > 0 else 0.0
        for y, z in zip(q, m, strict=True)
    ]
    return temperature**2 * (beta * of_teacher + (1 - beta) * of_student), gradient


def reverse_kl_row(student: list[float], teacher: list[float], temperature: float) -> Row:
    p, q = distribution(teacher, temperature), distribution(student, temperature)
    value = math.fsum(y * math.log(y / x) for x, y in zip(p, q, strict=True) if y > 0)
    gradient = [temperature * y * (math.log(y / x) - value) if y > 0 else 0.0 for x, y in zip(p, q, strict=True)]
    return temperature**2 * value, gradient


def forward_kl_row(student: list[float], teacher: list[float], temperature: float) -> Row:
    p, q = distribution(teacher, temperature), distribution(student, temperature)
    value = math.fsum(x * math.log(x / y) for x, y in zip(p, q, strict=True) if x > 0)
    return temperature**2 * value, [temperature * (y - x) for x, y in zip(p, q, strict=True)]


def logit_mse_row(student: list[float], teacher: list[float], center: bool) -> Row:
    differences = [s - t for s, t in zip(student, teacher, strict=True)]
    if center:
        mean = math.fsum(differences) / len(differences)
        differences = [d - mean for d in differences]
    return math.fsum(d * d for d in differences) / len(differences), [2 * d / len(differences) for d in differences]


def row_of(term: VocabularyTerm) -> Callable[[list[float], list[float]], Row]:
    """The loop that a term has to agree with."""
    if isinstance(term, LogitMse):
        return lambda s, t: logit_mse_row(s, t, term.center)
    if isinstance(term, ReverseKl) or (isinstance(term, Jsd) and term.beta == 1):
        return lambda s, t: reverse_kl_row(s, t, term.temperature)
    if isinstance(term, Soft) or (isinstance(term, Jsd) and term.beta == 0):
        return lambda s, t: forward_kl_row(s, t, term.temperature)
    assert isinstance(term, Jsd)
    return lambda s, t: jensen_shannon_row(s, t, term.temperature, term.beta)


def loop(term: VocabularyTerm, student: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor]:
    """Values [N] and the gradient [N, V] of their sum for the student's logits, in float64."""
    pairs = zip(student.detach().double().tolist(), teacher.detach().double().tolist(), strict=True)
    rows = [row_of(term)(s, t) for s, t in pairs]
    values = torch.tensor([value for value, _ in rows], dtype=torch.float64)
    gradient = torch.tensor([gradient for _, gradient in rows], dtype=torch.float64)
    return values, gradient.reshape(student.shape)


def new_terms() -> dict[str, VocabularyTerm]:
    return {
        "reverse_kl": ReverseKl(),
        "reverse_kl_cold": ReverseKl(temperature=1.0, positions=SoftPositions.masked),
        "jsd": Jsd(),
        "jsd_near_the_teacher": Jsd(temperature=3.7, beta=0.9),
        "jsd_masked": Jsd(temperature=1.0, positions=SoftPositions.targets, beta=0.1),
        "jsd_forward": Jsd(beta=0.0),
        "jsd_reverse": Jsd(beta=1.0),
        "logit_mse": LogitMse(),
        "logit_mse_centered": LogitMse(positions=SoftPositions.masked, center=True),
    }


@pytest.mark.parametrize("shape", [(1, 2), (3, 7), (13, 301)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", new_terms())
def test_the_losses_are_their_formulas(name: str, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    term = new_terms()[name]
    torch.manual_seed(0)
    student, teacher = (torch.randn(shape, dtype=torch.float64) * 3 for _ in range(2))
    student, teacher = student.to(dtype).requires_grad_(), teacher.to(dtype)
    values = term.losses(student, teacher, torch.zeros(shape[0], dtype=torch.int64))
    assert values.dtype == dtype and values.shape == shape[:1]
    upstream = torch.linspace(-3, 5, shape[0], dtype=dtype)
    values.backward(upstream)
    want, want_gradient = loop(term, student, teacher)
    relative = 1e-11 if dtype == torch.float64 else 3e-5
    assert student.grad is not None
    torch.testing.assert_close(values.double(), want, rtol=relative, atol=relative)
    wanted = want_gradient * upstream[:, None]
    torch.testing.assert_close(student.grad.double(), wanted, rtol=relative, atol=relative * float(wanted.abs().max()))


@pytest.mark.parametrize("masked", [0.0, 0.4])
@pytest.mark.parametrize("rows", [0, 1, 15])
@pytest.mark.parametrize("name", new_terms())
def test_both_paths_agree_with_the_loops_down_to_the_head(name: str, rows: int, masked: float) -> None:
    """Value, and gradients of rows, weight and bias under an upstream gradient, with padded vocabularies."""
    term, case = new_terms()[name], problem(rows, masked=masked)
    assert case.targets is not None and case.teacher is not None
    student, teacher = (head._replace(dtype=torch.float32) for head in (case.student, case.teacher))
    z, y = (linear(*(tensor.double() for tensor in head[:3]))[:, :VOCAB] for head in (student, teacher))
    values, on_logits = loop(term, z, y)
    on = torch.ones(rows).bool() if term.positions == ALL else case.targets != NO_TARGET
    values, on_logits = values * on, 0.3 * -2.5 * on_logits * on[:, None]
    wanted = [torch.zeros(tensor.shape, dtype=torch.float64) for tensor in student[:3]]
    wanted[0][:] = on_logits @ student.weight[:VOCAB].double()
    wanted[1][:VOCAB] = on_logits.T @ student.rows.double()
    wanted[2][:VOCAB] = on_logits.sum(0)
    scales = torch.tensor([0.3])
    arguments = (student, teacher, case.targets)
    paths = {
        "plain": PlainLosses([term], VOCAB)(*arguments, scales),
        "chunked": ChunkedLosses([term], VOCAB)(*arguments, scales),
        "small": ChunkedLosses([term], VOCAB, tiling=CPU._replace(budget=4 * BOTH_HEADS))(*arguments, scales),
    }
    for loss, sums in paths.values():
        assert float(sums[0]) == pytest.approx(float(values.sum()), rel=1e-5, abs=1e-5)
        assert loss.item() == pytest.approx(0.3 * float(values.sum()), rel=1e-5, abs=1e-5)
        for found, want in zip(gradients(loss, case.student, -2.5), wanted, strict=True):
            largest = float(want.detach().abs().max()) if want.numel() else 0.0
            torch.testing.assert_close(found.double(), want, rtol=0, atol=2e-5 * max(largest, 1e-6))


@pytest.mark.parametrize("name", new_terms())
def test_bf16_products_are_near(name: str) -> None:
    term, case = new_terms()[name], problem(masked=0.4)
    assert case.targets is not None
    scales = torch.ones(1)
    exact, _ = ChunkedLosses([term], VOCAB)(case.student, case.teacher, case.targets, scales)
    rough = case.student._replace(dtype=torch.bfloat16)
    loss, _ = ChunkedLosses([term], VOCAB)(rough, case.teacher, case.targets, scales)
    torch.testing.assert_close(loss, exact, rtol=1e-2, atol=0)
    assert loss.item() != exact.item()
    for found, want in zip(gradients(loss, case.student), gradients(exact, case.student), strict=True):
        assert (found - want).norm() < 0.02 * want.norm()


@pytest.mark.parametrize("name", new_terms())
def test_extreme_logits_stay_finite(name: str) -> None:
    """Where one of the two distributions has no probability left that fp32 could hold."""
    term = new_terms()[name]
    student = torch.tensor([[3e4, 0.0, -3e4], [-3e4, 0.0, 3e4]]).requires_grad_()
    values = term.losses(student, torch.tensor([[-3e4, 0.0, 3e4], [-3e4, 0.0, 3e4]]), torch.zeros(2).long())
    values.sum().backward()
    assert student.grad is not None and values.isfinite().all() and student.grad.isfinite().all()
    assert values[0] > 0.3 and abs(values[1].item()) < 1e-5


def test_jensen_shannon_jumps_at_both_ends() -> None:
    """Towards beta = 0 it is beta times the forward divergence, at 0 that divergence itself; at 1 the reverse one."""
    torch.manual_seed(0)
    student, teacher = (torch.randn(5, 17, dtype=torch.float64) for _ in range(2))
    forward, reverse = losses.soft(student, teacher, 2.0), losses.reverse_kl(student, teacher, 2.0)
    torch.testing.assert_close(losses.jensen_shannon(student, teacher, 2.0, 0.0), forward)
    torch.testing.assert_close(losses.jensen_shannon(student, teacher, 2.0, 1.0), reverse)
    near = [losses.jensen_shannon(student, teacher, 2.0, beta) for beta in (1e-6, 1 - 1e-6)]
    torch.testing.assert_close(near[0] / 1e-6, forward, rtol=1e-4, atol=0)
    torch.testing.assert_close(near[1] / 1e-6, reverse, rtol=1e-4, atol=0)


def test_centered_squared_error_is_twice_the_limit_of_soft_targets() -> None:
    torch.manual_seed(0)
    student, teacher = (torch.randn(5, 17, dtype=torch.float64) for _ in range(2))
    limit = losses.soft(student, teacher, 1e4)
    torch.testing.assert_close(losses.logit_mse(student, teacher, center=True), 2 * limit, rtol=1e-3, atol=0)
    shifted = losses.logit_mse(student + 3.0, teacher, center=True)
    torch.testing.assert_close(shifted, losses.logit_mse(student, teacher, center=True))


# --- as terms of a run

MORE: dict[str, dict[str, Any]] = {
    "reverse_kl": {"weight": 0.7, "positions": "masked"},
    "jsd": {"weight": 1.3, "beta": 0.25, "temperature": 1.5},
    "logit_mse": {"weight": 0.2, "center": True},
}


def test_each_is_divided_by_its_own_count_over_the_whole_step(tokenizer: Any, teacher: Any) -> None:
    """Two micro-batches of unequal masks: loss and gradient are those of the loops, each over all its positions."""
    settings = tiny.objective_config(soft=0.0, mlm=2.0, cosine=0.0, temperature=3.0, **MORE)
    rows = tiny.make_rows(4, shortest=4)
    batches = tiny.make_batches(rows, tiny.make_masks(tokenizer, rows, mlm_probability=0.3), 2, 2, 0).window(0)
    student = tiny.make_model("distilbert", 1, seed=2)
    objective = tiny.make_objective(settings, student, teacher)
    loss, sums = tiny.loss_of(objective, student, teacher, batches)
    loss.backward()
    found = {name: p.grad.clone() for name, p in student.named_parameters()}
    counts = objective.by_name(objective.count(batches).tolist())
    targets = sum(len(batch.targets.positions) for batch in batches)
    valid = sum(batch.num_valid for batch in batches)
    assert len({len(batch.targets.positions) for batch in batches}) == 2
    assert (counts["reverse_kl"], counts["jsd"], counts["logit_mse"]) == (targets, valid, valid)
    student.zero_grad()
    total = torch.zeros((), dtype=torch.float64)
    for batch in batches:
        ids, attention = batch.ids, attention_of(batch)
        z = student(input_ids=ids, attention_mask=attention).logits.flatten(0, 1)[:, : tiny.VOCAB]
        with torch.no_grad():
            y = teacher(input_ids=ids, attention_mask=attention).logits.flatten(0, 1)[:, : tiny.VOCAB]
        on_target = torch.tensor(sorted(targets_of(batch)))
        on_text = attention.flatten().nonzero()[:, 0]
        for name, positions in (("reverse_kl", on_target), ("jsd", on_text), ("logit_mse", on_text)):
            term = objective.terms[name]
            assert isinstance(term, VocabularyTerm)
            values, gradient = loop(term, z[positions], y[positions])
            scale = MORE[name]["weight"] / counts[name]
            total = total + scale * values.sum()
            z[positions].backward(scale * gradient.float(), retain_graph=True)
        words = losses.mlm(z[on_target], torch.tensor([targets_of(batch)[p] for p in on_target.tolist()])).sum()
        (2.0 * words / counts["mlm"]).backward()
        total = total + 2.0 * words.detach() / counts["mlm"]
    assert loss.item() == pytest.approx(total.item(), rel=1e-5)
    assert all(sums[name] > 0 for name in MORE)
    tiny.assert_close(found, {name: p.grad for name, p in student.named_parameters()}, rtol=1e-3, atol=2e-6)


def test_the_objectives_temperature_reaches_terms_without_one_of_their_own() -> None:
    given: dict[str, Any] = {
        "temperature": 3.0,
        "reverse_kl": {"weight": 1.0},
        "jsd": {"weight": 1.0, "temperature": 1.5},
        "logit_mse": {"weight": 1.0},
        "mlm": {"weight": 1.0},
        "other": {"kind": "soft", "weight": 1.0},
    }
    settings = named_terms(**given)
    made = {name: settings.component(name)() for name in settings.terms}
    assert made["reverse_kl"].temperature == made["other"].temperature == made["other"].top_k_temperature == 3.0
    assert made["jsd"].temperature == 1.5 and not hasattr(made["logit_mse"], "temperature")
    assert type(made["mlm"]) is Mlm


def test_so_does_one_that_follows_a_schedule() -> None:
    given: dict[str, Any] = {
        "temperature": {"start": 4.0, "end": 1.0},
        "reverse_kl": {"weight": 1.0},
        "jsd": {"weight": 1.0, "temperature": 1.5},
        "logit_mse": {"weight": 1.0},
        "mlm": {"weight": 1.0},
    }
    settings = named_terms(**given)
    assert settings.schedule_of("reverse_kl") == WeightSchedule(start=4.0, end=1.0)
    assert settings.component("reverse_kl")().temperature == 4.0
    assert settings.schedule_of("jsd") is settings.schedule_of("logit_mse") is settings.schedule_of("mlm") is None


@pytest.mark.parametrize(
    ("term", "words"),
    [
        ({"kind": "jsd", "beta": 1.5}, "objective.x.beta=1.5"),
        ({"kind": "jsd", "temperature": 0.0}, "objective.x.temperature=0.0"),
        ({"kind": "reverse_kl", "temperature": -1.0}, "objective.x.temperature=-1.0"),
        ({"kind": "reverse_kl", "positions": "some"}, "objective.x.positions"),
        ({"kind": "logit_mse", "temperature": 2.0}, "objective.x.temperature: no setting"),
    ],
)
def test_what_they_do_not_take_is_refused(term: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        named_terms(x={"weight": 1.0, **term}).component("x")()
