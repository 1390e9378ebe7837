"""The objective against its definition in float64 loops: value and gradient, and the same for every split."""

import contextlib
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from job import whole_run
from naive import definition
from tiny import PAD, VOCAB, loop, loss_of, make_masks, make_model, make_objective, make_rows, objective_config, only

from distill.config.settings import BackendConfig, Config, ObjectiveConfig, PrecisionConfig
from distill.data.batch import Batch, Labels
from distill.distributed import GradientSync
from distill.distributed.single import Single
from distill.models.language_model import LanguageModel
from distill.objective.build import make_terms
from distill.objective.running_mean import RunningMean
from distill.objective.trainable import Trainable
from distill.optim.schedule import total_steps
from distill.runtime.seed import key
from distill.teacher.live import LiveTeacher

# What the tests do in float64 still passes through a few sums in fp32.
NEAR = {"rtol": 2e-6, "atol": 1e-7}
BF16 = PrecisionConfig(student="bf16", teacher="bf16")


def window(
    tokenizer: Any, count: int = 6, batch_size: int = 2, shortest: int | None = 4, **masking: Any
) -> list[Batch]:
    rows = make_rows(count, shortest=shortest)
    masks = make_masks(tokenizer, rows, **{"mlm_probability": 0.3, **masking})
    return tiny.make_batches(rows, masks, batch_size, -(-count // batch_size), 0).window(0)


def without_targets(batch: Batch) -> Batch:
    none = torch.empty(0, dtype=torch.int64)
    return replace(batch, labels={"mlm": Labels(none, none)})


def gradient(model: Any) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() if p.grad is not None else torch.zeros_like(p) for name, p in model.named_parameters()}


def step(
    settings: ObjectiveConfig,
    student: Any,
    teacher: Any | None,
    batches: list[Batch],
    precision: PrecisionConfig | None = None,
) -> tuple[float, dict[str, float]]:
    """Loss of a window and the means of its terms; the gradient is left in the student."""
    student.zero_grad()
    objective = make_objective(settings, student, teacher)
    loss, sums = loss_of(objective, student, teacher, batches, precision=precision)
    loss.backward()
    tally = RunningMean()
    tally.add(sums, objective.by_name(objective.count(batches).tolist()), objective.weights)
    means = tally.means(objective.names)
    assert means["total"] == pytest.approx(float(loss.detach()), rel=1e-5, abs=1e-6, nan_ok=not any(sums.values()))
    return float(loss.detach()), means


CASES = {
    "default": objective_config(),
    "masked": objective_config(rows="masked"),
    "cutoff": objective_config(cutoff=0.02),
    "masked_cutoff": objective_config(soft=1.0, rows="masked", cutoff=0.05, temperature=1.5),
    "hot": objective_config(temperature=8.0),
    "soft": only(soft=1.0),
    "soft_masked": objective_config(1.0, 0.0, 0.0, rows="masked"),
    "cosine": only(cosine=0.7),
    "cosine_masked": only(cosine=0.7, cosine_rows="masked"),
    "all_masked": objective_config(rows="masked", cosine_rows="masked"),
    "soft_all_cosine_masked": objective_config(cosine_rows="masked"),
    "mlm": only(mlm=2.0),
    "no_mlm": objective_config(mlm=0.0),
    "no_soft": objective_config(soft=0.0),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("shortest", [4, None], ids=["padded", "full"])
def test_value_and_gradient_are_those_of_the_definition(
    tokenizer: Any, teacher: Any, case: str, shortest: int | None
) -> None:
    settings = CASES[case]
    batches = window(tokenizer, count=4, shortest=shortest)
    student = make_model("distilbert", 1, seed=2).double()
    needed = teacher.double() if case != "mlm" else None
    try:
        loss, means = step(settings, student, needed, batches)
        found = gradient(student)
        student.zero_grad()
        expected, expected_means = definition(settings, student, needed, batches)
        expected.backward()
    finally:
        teacher.float()
    assert loss == pytest.approx(expected.item(), rel=2e-6)
    for name, mean in expected_means.items():
        if settings.terms[name].weight > 0:
            assert means[name] == pytest.approx(mean, rel=2e-6), name
    assert any(float(grad.abs().max()) > 1e-3 for grad in found.values())
    tiny.assert_close(found, gradient(student), **NEAR)


def test_no_teacher_is_asked_where_none_is_needed(tokenizer: Any) -> None:
    """With the masked tokens alone the loss is the same whether a teacher is there or not."""
    batches, student = window(tokenizer), make_model("distilbert", 1)

    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("the teacher was asked")

    teacher = make_model("bert", 1)
    teacher.forward = teacher.bert.forward = never
    assert not make_objective(only(mlm=1.0), student, teacher).needs_teacher
    assert step(only(mlm=1.0), student, teacher, batches) == step(only(mlm=1.0), student, None, batches)


@pytest.mark.parametrize("case", ["default", "masked", "mlm", "cosine", "all_masked"])
def test_micro_batch_without_targets(tokenizer: Any, teacher: Any, case: str) -> None:
    """It gives nothing to the masked tokens, no nan, and its positions still count for the other terms."""
    settings = CASES[case]
    batches = window(tokenizer)
    batches[1] = without_targets(batches[1])
    student = make_model("distilbert", 1, seed=2)
    loss, _ = step(settings, student, teacher, batches)
    found = gradient(student)
    student.zero_grad()
    expected, _ = definition(settings, student, teacher, batches)
    expected.backward()
    assert loss == pytest.approx(expected.item(), rel=1e-5)
    tiny.assert_close(found, gradient(student), rtol=1e-3, atol=2e-5)


@pytest.mark.parametrize("case", ["mlm", "soft_masked"])
def test_window_without_any_target(tokenizer: Any, teacher: Any, case: str) -> None:
    batches, student = [without_targets(batch) for batch in window(tokenizer)], make_model("distilbert", 1)
    loss, _ = loss_of(make_objective(CASES[case], student, teacher), student, teacher, batches)
    loss.backward()
    assert loss.item() == 0 and all(float(grad.abs().max()) == 0 for grad in gradient(student).values())


@pytest.mark.parametrize("batch_size", [1, 2, 3, 4])
def test_same_gradient_for_every_split(tokenizer: Any, teacher: Any, batch_size: int) -> None:
    student = make_model("distilbert", 1, seed=2).double()
    objective = make_objective(objective_config(), student, teacher)
    try:
        whole, parts = (window(tokenizer, count=6, batch_size=size) for size in (6, batch_size))
        counts = {len(batch.labels["mlm"].positions) for batch in window(tokenizer, count=6, batch_size=1)}
        assert len(counts) > 1
        torch.testing.assert_close(objective.count(whole), objective.count(parts))
        loss, _ = step(objective_config(), student, teacher.double(), whole)
        expected = gradient(student)
        assert step(objective_config(), student, teacher, parts)[0] == pytest.approx(loss, rel=2e-6)
    finally:
        teacher.float()
    tiny.assert_close(gradient(student), expected, **NEAR)


def test_padding_weighs_nothing(tokenizer: Any, teacher: Any) -> None:
    """The same rows in wider batches: same loss, same gradient."""
    rows = make_rows(4, shortest=4).astype(np.int64)
    masks, numbers = make_masks(tokenizer, rows, mlm_probability=0.3), np.arange(4)
    keys = key(0, "mask", 0, numbers)
    wide = np.concatenate([rows, np.full((4, 6), PAD)], axis=1)
    student = make_model("distilbert", 1, seed=2)
    loss, _ = step(objective_config(), student, teacher, [masks.collate(rows, keys, numbers)])
    expected = gradient(student)
    again, _ = step(objective_config(), student, teacher, [masks.collate(wide, keys, numbers)])
    assert again == pytest.approx(loss, rel=1e-5)
    tiny.assert_close(gradient(student), expected, rtol=1e-4, atol=1e-6)


def test_counts_by_name(tokenizer: Any) -> None:
    """Each term has its own positions, over all micro-batches."""
    batches = window(tokenizer)
    targets = float(sum(len(batch.labels["mlm"].positions) for batch in batches))
    positions = float(sum(int((batch.ids != PAD).sum()) for batch in batches))
    assert positions > targets > 0
    for rows, soft in (("all", positions), ("masked", targets)):
        further = {name: {"weight": 1.0, "positions": rows} for name in ("reverse_kl", "jsd", "logit_mse")}
        settings = objective_config(rows=rows, cosine_rows=rows, **further)
        objective = make_objective(settings, make_model("bert", 1), make_model("bert", 1))
        wanted = {name: soft for name in objective.names} | {"mlm": targets, "tokens": positions}
        assert objective.by_name(objective.count(batches).tolist()) == wanted
        assert set(objective.count([]).tolist()) == {0.0}


def test_a_weight_is_rounded_once_per_step(tokenizer: Any, teacher: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The encoder's by autocast, the head's by its model; the gradient stays what it is without, bit for bit."""
    batches, student = window(tokenizer), make_model("distilbert", 1, seed=2)
    objective, ranks = make_objective(objective_config(), student, teacher), Single(BackendConfig(device="cpu"))
    model, live = Trainable(LanguageModel(student, "bf16")), LiveTeacher(LanguageModel(teacher, "bf16"))
    sync = GradientSync(ranks, model)
    casts, found = [], []
    for keeps in (True, False):
        if not keeps:
            monkeypatch.setattr(LanguageModel, "weight_cast_cache", lambda _: contextlib.nullcontext())
        with torch.profiler.profile() as profile:
            scales = objective.scales(objective.count(batches), ranks.device)
            loop.accumulate_gradients(model, live, objective, batches, scales, sync)
        casts.append(sum(event.count for event in profile.key_averages() if event.key == "aten::_to_copy"))
        found.append(sync.gradients.clone())
    assert torch.equal(*found) and float(found[0].abs().max()) > 0
    linear = sum(isinstance(module, torch.nn.Linear) for module in student.modules())
    assert len(batches) > 1 and casts[1] - casts[0] >= (len(batches) - 1) * (linear - 1)
    monkeypatch.undo()
    rows, weight = torch.randn(3, tiny.WIDTH), student.vocab_projector.weight
    with model.student.weight_cast_cache():
        first = model.student.head(rows).rounded
        assert first.dtype == torch.bfloat16 and model.student.head(rows).rounded is first
    torch.optim.AdamW(student.parameters(), lr=0.1, fused=True).step()
    with model.student.weight_cast_cache():
        assert torch.equal(model.student.head(rows).rounded, weight.bfloat16())


def compiles(train: dict[str, Any], device: str = "cpu", compiles: bool = False, **settings: Any) -> bool:
    """Whether a run does, of 8 sequences of 128 tokens a step and a vocabulary of 6,144."""
    precision = PrecisionConfig(compile=compiles)
    config = Config(objective=objective_config(**settings), precision=precision)
    config = config.changed(train=config.train.changed(**train))
    batches: Any = SimpleNamespace(sequences_per_step=8, sequences=np.zeros((80, 128), np.uint16))
    ranks: Any = SimpleNamespace(device=torch.device(device))
    steps, terms = total_steps(config.train, 10), make_terms(config.objective)
    return whole_run.make_objective(config, terms, batches, steps, 6144, ranks).compiled


HOT = {"start": 4.0, "end": 1.0}


@pytest.mark.parametrize(
    ("train", "more", "expected"),
    [
        ({"epochs": None, "minutes": 1.0}, {}, False),
        ({"epochs": None, "minutes": 10.0}, {}, True),
        ({"epochs": 1, "minutes": 60.0}, {}, False),
        ({"epochs": 1}, {}, False),
        ({"epochs": None, "steps": 10_000}, {}, True),
        ({"epochs": None, "steps": 10_000, "minutes": 1.0}, {}, True),
        ({"epochs": 1}, {"device": "cuda"}, True),
        ({"epochs": None, "steps": 10_000}, {"kernel": "fused"}, False),
        ({"epochs": 1}, {"kernel": "fused", "compiles": True}, True),
        ({"epochs": 1}, {"compiles": True, "soft": HOT}, True),
        ({"epochs": 1}, {"compiles": True, "temperature": HOT}, False),
    ],
)
def test_long_runs_are_compiled(train: dict[str, Any], more: dict[str, Any], expected: bool) -> None:
    """By their steps, where they have any, and else by the clock; a temperature is a constant of the code."""
    assert compiles(train, **more) == expected


def test_rows_that_only_pad_the_embedding_get_no_share(tokenizer: Any) -> None:
    """Vocabularies padded to different sizes: both are cut to the real one."""
    student, teacher = make_model("distilbert", 1, vocab=VOCAB + 24), make_model("bert", 1, vocab=VOCAB + 8)
    with torch.no_grad():
        student.vocab_projector.bias[VOCAB:] = 50.0  # would take all the probability
        teacher.cls.predictions.bias[VOCAB:] = 50.0
    batches, settings = window(tokenizer), objective_config()
    loss, _ = step(settings, student, teacher, batches)
    assert float(student.vocab_projector.bias.grad[VOCAB:].abs().max()) == 0
    with torch.no_grad():
        assert loss == pytest.approx(float(definition(settings, student, teacher, batches)[0]), rel=1e-5)


def test_bf16_is_near_fp32(tokenizer: Any, teacher: Any) -> None:
    batches, student, settings = window(tokenizer), make_model("distilbert", 1, seed=2), objective_config()
    exact, _ = step(settings, student, teacher, batches)
    expected = torch.cat([grad.flatten() for grad in gradient(student).values()])
    rough, _ = step(settings, student, teacher, batches, BF16)
    found = torch.cat([grad.flatten() for grad in gradient(student).values()])
    assert rough == pytest.approx(exact, rel=0.02) and rough != exact
    assert float(torch.cosine_similarity(found, expected, dim=0)) > 0.99
    assert all(p.dtype == torch.float32 for p in student.parameters())


def test_the_order_of_the_terms_is_known_to_the_objective_alone(tokenizer: Any, teacher: Any) -> None:
    """Written in another order, the terms have the same sums by name and the same gradient."""
    batches, student = window(tokenizer), make_model("distilbert", 1, seed=2)
    settings = objective_config()
    backwards = tiny.named_terms(**dict(reversed(settings.terms.items())), temperature=2.0)
    assert list(backwards.terms) == ["cosine", "mlm", "soft"]
    loss, means = step(settings, student, teacher, batches)
    expected = gradient(student)
    again, means_again = step(backwards, student, teacher, batches)
    assert again == pytest.approx(loss, rel=1e-6) and means_again == pytest.approx(means, rel=1e-6)
    tiny.assert_close(gradient(student), expected, rtol=1e-5, atol=1e-7)
