"""The objective against its definition in float64 loops: value and gradient, and the same for every split."""

import contextlib
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from naive import definition
from tiny import PAD, VOCAB, make_masker, make_model, make_rows, only

from distill.config import Objective as Settings
from distill.config import Precision, Rows, Soft, Term
from distill.data.batches import Batch, Batches, make_batch
from distill.data.collate.mlm import IGNORE
from distill.kernels.precision import casts_kept, rounded
from distill.objective.objective import TERMS, Objective, pays_to_compile
from distill.seed import key

# What the tests do in float64 still passes through a few sums in fp32.
NEAR = {"rtol": 2e-6, "atol": 1e-7}


def window(
    tokenizer: Any, count: int = 6, batch_size: int = 2, shortest: int | None = 4, **masking: Any
) -> list[Batch]:
    rows = make_rows(count, shortest=shortest)
    masker = make_masker(tokenizer, rows, **{"share": 0.3, **masking})
    return Batches(rows, masker, PAD, batch_size, -(-count // batch_size), 0).window(0)


def gradient(model: Any) -> dict[str, torch.Tensor]:
    return {name: p.grad if p.grad is not None else torch.zeros_like(p) for name, p in model.named_parameters()}


def step(objective: Objective, student: Any, teacher: Any | None, batches: list[Batch]) -> tuple[float, torch.Tensor]:
    """Loss and sums of a window, its gradient left in the student."""
    student.zero_grad()
    counts, total, sums = objective.counts(batches), 0.0, torch.zeros(3, dtype=torch.float64)
    for batch in batches:
        loss, parts = objective(student, teacher, batch, counts)
        loss.backward()
        total, sums = total + float(loss.detach()), sums + parts
        assert not parts.requires_grad
    assert float(objective.total(sums, counts)) == pytest.approx(total, rel=1e-5, abs=1e-6)
    return total, sums / counts.clamp(min=1)


CASES = {
    "default": Settings(),
    "masked": Settings(soft=Soft(5.0, Rows.masked)),
    "cutoff": Settings(soft=Soft(5.0, cutoff=0.02)),
    "masked_cutoff": Settings(temperature=1.5, soft=Soft(1.0, Rows.masked, cutoff=0.05)),
    "hot": Settings(temperature=8.0),
    "soft": only(soft=1.0),
    "soft_masked": replace(only(soft=1.0), soft=Soft(1.0, Rows.masked)),
    "cosine": only(cosine=0.7),
    "mlm": only(mlm=2.0),
    "no_mlm": Settings(mlm=Term(0.0)),
    "no_soft": Settings(soft=Soft(0.0)),
}


KERNELS = pytest.mark.parametrize("kernel", ["plain", "fused"])


@KERNELS
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("shortest", [4, None], ids=["padded", "full"])
def test_value_and_gradient_are_those_of_the_definition(
    tokenizer: Any, teacher: Any, case: str, shortest: int | None, kernel: str
) -> None:
    settings = replace(CASES[case], kernel=kernel)
    batches = window(tokenizer, count=4, shortest=shortest)
    student = make_model("distilbert", 1, seed=2).double()
    objective = Objective(settings, Precision(), VOCAB)
    needed = teacher.double() if objective.needs_teacher else None
    try:
        loss, means = step(objective, student, needed, batches)
        ours = {name: grad.clone() for name, grad in gradient(student).items()}
        student.zero_grad()
        expected, parts = definition(settings, student, needed, batches)
        expected.backward()
    finally:
        teacher.float()
    assert loss == pytest.approx(expected.item(), rel=2e-6)
    for name, ours_mean, mean in zip(TERMS, means.tolist(), parts, strict=True):
        if getattr(settings, name).weight > 0:
            assert ours_mean == pytest.approx(mean, rel=2e-6), name
    assert any(float(grad.abs().max()) > 1e-3 for grad in ours.values())
    tiny.assert_close(ours, gradient(student), **NEAR)


def test_no_teacher_is_asked_where_none_is_needed(tokenizer: Any) -> None:
    """With the masked words alone the loss is the same whether a teacher is there or not."""
    batches, student = window(tokenizer), make_model("distilbert", 1)

    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("the teacher was asked")

    teacher = make_model("bert", 1)
    teacher.forward = teacher.bert.forward = never
    objective = Objective(only(mlm=1.0), Precision(), VOCAB)
    assert not objective.needs_teacher
    assert step(objective, student, teacher, batches)[0] == step(objective, student, None, batches)[0]


@KERNELS
@pytest.mark.parametrize("case", ["default", "masked", "mlm", "cosine"])
def test_micro_batch_without_targets(tokenizer: Any, teacher: Any, case: str, kernel: str) -> None:
    """It gives nothing to the masked words, no nan, and its positions still count for the other terms."""
    settings = replace(CASES[case], kernel=kernel)
    batches = window(tokenizer)
    empty = torch.full_like(batches[1].targets, IGNORE)
    batches[1] = batches[1]._replace(targets=empty, masked=torch.empty(0, dtype=torch.int64))
    student = make_model("distilbert", 1, seed=2)
    loss, _ = step(Objective(settings, Precision(), VOCAB), student, teacher, batches)
    ours = {name: grad.clone() for name, grad in gradient(student).items()}
    student.zero_grad()
    expected, _ = definition(settings, student, teacher, batches)
    expected.backward()
    assert loss == pytest.approx(expected.item(), rel=1e-5)
    tiny.assert_close(ours, gradient(student), rtol=1e-3, atol=2e-5)


@KERNELS
def test_window_without_any_target(tokenizer: Any, teacher: Any, kernel: str) -> None:
    batches = [
        b._replace(targets=torch.full_like(b.targets, IGNORE), masked=torch.empty(0, dtype=torch.int64))
        for b in window(tokenizer)
    ]
    student = make_model("distilbert", 1)
    for case in ("mlm", "soft_masked"):
        loss, _ = step(Objective(replace(CASES[case], kernel=kernel), Precision(), VOCAB), student, teacher, batches)
        assert loss == 0 and all(float(grad.abs().max()) == 0 for grad in gradient(student).values())


@pytest.mark.parametrize("batch_size", [1, 2, 3, 4])
def test_same_gradient_for_every_split(tokenizer: Any, teacher: Any, batch_size: int) -> None:
    objective, student = Objective(Settings(), Precision(), VOCAB), make_model("distilbert", 1, seed=2).double()
    try:
        whole, parts = (window(tokenizer, count=6, batch_size=size) for size in (6, batch_size))
        assert len({batch.num_targets for batch in window(tokenizer, count=6, batch_size=1)}) > 1
        torch.testing.assert_close(objective.counts(whole), objective.counts(parts))
        loss, _ = step(objective, student, teacher.double(), whole)
        expected = {name: grad.clone() for name, grad in gradient(student).items()}
        assert step(objective, student, teacher, parts)[0] == pytest.approx(loss, rel=2e-6)
    finally:
        teacher.float()
    tiny.assert_close(gradient(student), expected, **NEAR)


def test_padding_weighs_nothing(tokenizer: Any, teacher: Any) -> None:
    """The same rows in wider batches: same loss, same gradient."""
    rows = make_rows(4, shortest=4).astype(np.int64)
    masker, keys = make_masker(tokenizer, rows, share=0.3), key(0, "mask", 0, np.arange(4))
    wide = np.concatenate([rows, np.full((4, 6), PAD)], axis=1)
    objective, student = Objective(Settings(), Precision(), VOCAB), make_model("distilbert", 1, seed=2)
    loss, _ = step(objective, student, teacher, [make_batch(rows, keys, masker, PAD)])
    expected = {name: grad.clone() for name, grad in gradient(student).items()}
    assert step(objective, student, teacher, [make_batch(wide, keys, masker, PAD)])[0] == pytest.approx(loss, rel=1e-5)
    tiny.assert_close(gradient(student), expected, rtol=1e-4, atol=1e-6)


def test_counts(tokenizer: Any) -> None:
    batches = window(tokenizer)
    targets, positions = (float(sum(getattr(b, n) for b in batches)) for n in ("num_targets", "num_positions"))
    assert positions == sum(float((b.inputs != PAD).sum()) for b in batches) > targets > 0
    for rows, soft in ((Rows.all, positions), (Rows.masked, targets)):
        counts = Objective(Settings(soft=Soft(rows=rows)), Precision(), VOCAB).counts(batches)
        assert counts.dtype == torch.float64 and counts.tolist() == [soft, targets, positions]
    assert Objective(Settings(), Precision(), VOCAB).counts([]).tolist() == [0, 0, 0]


def test_a_weight_is_rounded_once_per_step(tokenizer: Any, teacher: Any) -> None:
    """The encoder's by autocast, the head's by the objective; the gradient stays what it is without, bit for bit."""
    objective, batches = Objective(Settings(), Precision("bf16", "bf16"), VOCAB), window(tokenizer)
    student = make_model("distilbert", 1, seed=2)
    step(objective, student, teacher, batches)
    expected = {name: grad.clone() for name, grad in gradient(student).items()}
    casts = []
    for keep in (contextlib.nullcontext(), casts_kept(torch.device("cpu"))):
        for tensor in student.parameters():
            tensor.grad = None
        with torch.profiler.profile() as profile, keep:
            step(objective, student, teacher, batches)
        casts.append(sum(event.count for event in profile.key_averages() if event.key == "aten::_to_copy"))
        assert all(torch.equal(grad, expected[name]) for name, grad in gradient(student).items())
    linear = sum(isinstance(module, torch.nn.Linear) for module in student.modules())
    assert len(batches) > 1 and casts[0] - casts[1] >= (len(batches) - 1) * (linear - 1)
    weight = student.vocab_projector.weight
    with casts_kept(torch.device("cpu")):
        first = rounded(weight, torch.bfloat16)
        assert rounded(weight, torch.bfloat16) is first
    torch.optim.AdamW(student.parameters(), lr=0.1, fused=True).step()
    with casts_kept(torch.device("cpu")):
        assert torch.equal(rounded(weight, torch.bfloat16), weight.bfloat16())


def test_long_runs_are_compiled_and_short_ones_are_not() -> None:
    cpu, auto, fused = torch.device("cpu"), Settings(), Settings(kernel="fused")
    assert [pays_to_compile(auto, Precision(), cpu, n) for n in (1e8, 1e11)] == [False, True]
    assert pays_to_compile(auto, Precision(), torch.device("cuda"), 1.0)
    assert not pays_to_compile(fused, Precision(), cpu, 1e12)
    assert pays_to_compile(fused, Precision(compile=True), cpu, 1.0)


@KERNELS
def test_rows_that_only_pad_the_embedding_get_no_share(tokenizer: Any, kernel: str) -> None:
    """Vocabularies padded to different sizes: both are cut to the real one."""
    student, teacher = make_model("distilbert", 1, vocab=VOCAB + 24), make_model("bert", 1, vocab=VOCAB + 8)
    with torch.no_grad():
        student.vocab_projector.bias[VOCAB:] = 50.0  # would take all the probability
        teacher.cls.predictions.bias[VOCAB:] = 50.0
    batches, settings = window(tokenizer), Settings(kernel=kernel)
    loss, _ = step(Objective(settings, Precision(), VOCAB), student, teacher, batches)
    assert float(student.vocab_projector.bias.grad[VOCAB:].abs().max()) == 0
    with torch.no_grad():
        assert loss == pytest.approx(float(definition(settings, student, teacher, batches)[0]), rel=1e-5)


@KERNELS
def test_bf16_is_near_fp32(tokenizer: Any, teacher: Any, kernel: str) -> None:
    batches, student = window(tokenizer), make_model("distilbert", 1, seed=2)
    exact, _ = step(Objective(Settings(kernel=kernel), Precision(), VOCAB), student, teacher, batches)
    expected = torch.cat([grad.flatten().clone() for grad in gradient(student).values()])
    rough, _ = step(Objective(Settings(kernel=kernel), Precision("bf16", "bf16"), VOCAB), student, teacher, batches)
    ours = torch.cat([grad.flatten() for grad in gradient(student).values()])
    assert rough == pytest.approx(exact, rel=0.02) and rough != exact
    assert float(torch.cosine_similarity(ours, expected, dim=0)) > 0.99
    assert all(p.dtype == torch.float32 for p in student.parameters())


@pytest.mark.parametrize("micro_batches", [2, 3, 10])
@pytest.mark.parametrize("shortest", [None, 4], ids=["full", "padded"])
def test_one_forward_of_the_teacher_for_several_micro_batches(
    tokenizer: Any, teacher: Any, micro_batches: int, shortest: int | None
) -> None:
    batches = window(tokenizer, count=7, shortest=shortest)  # 2, 2, 2 and 1 rows
    student, forwards = make_model("distilbert", 2), []
    handle = teacher.base_model.register_forward_pre_hook(lambda *_: forwards.append(1))
    found = []
    for many in (1, micro_batches):
        objective = Objective(Settings(), Precision(), VOCAB, micro_batches=many)
        counts = objective.counts(batches)
        student.zero_grad()
        for batch, taught in objective.ask(teacher, batches):
            objective(student, teacher, batch, counts, taught)[0].backward()
        found.append((len(forwards), gradient(student)))
        forwards.clear()
    handle.remove()
    assert [count for count, _ in found] == [4, -(-4 // micro_batches)]
    torch.testing.assert_close(found[0][1], found[1][1], rtol=1e-4, atol=1e-6)
