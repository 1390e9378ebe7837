"""The objective against its definition in float64 loops: value and gradient, and the same for every split."""

import contextlib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from job import Shelf, metrics, results, whole_run
from naive import definition
from test_checkpoint import killed_after, make_fit
from tiny import (
    PAD,
    VOCAB,
    Fit,
    assert_close,
    loop,
    loss_of,
    make_masks,
    make_model,
    make_objective,
    make_rows,
    named_terms,
    new_student,
    objective_config,
    only,
    plain_sgd,
    weights_of,
)

from distill.config.objective import WeightSchedule
from distill.config.settings import BackendConfig, Config, ObjectiveConfig, PrecisionConfig, TrainConfig
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
    settings: ObjectiveConfig, student: Any, teacher: Any | None, batches: list[Batch]
) -> tuple[float, dict[str, float]]:
    """Loss of a window and the means of its terms; the gradient is left in the student."""
    student.zero_grad()
    objective = make_objective(settings, student, teacher)
    loss, sums = loss_of(objective, student, teacher, batches)
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
    assert_close(found, gradient(student), **NEAR)


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
    assert_close(found, gradient(student), rtol=1e-3, atol=2e-5)


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
    assert_close(gradient(student), expected, **NEAR)


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
    assert_close(gradient(student), expected, rtol=1e-4, atol=1e-6)


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


def test_a_weight_that_is_rounded_once_per_step_changes_nothing(
    tokenizer: Any, teacher: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The encoder's by autocast, the head's by its model, until the optimizer moves it."""
    batches, student = window(tokenizer), make_model("distilbert", 1, seed=2)
    objective, ranks = make_objective(objective_config(), student, teacher), Single(BackendConfig(device="cpu"))
    model, live = Trainable(LanguageModel(student, "bf16")), LiveTeacher(LanguageModel(teacher, "bf16"))
    sync, scales, found = GradientSync(ranks, model), objective.scales(objective.count(batches), ranks.device), []
    for keeps in (True, False):
        if not keeps:
            monkeypatch.setattr(LanguageModel, "weight_cast_cache", lambda _: contextlib.nullcontext())
        loop.accumulate_gradients(model, live, objective, batches, scales, sync)
        found.append(sync.gradients.clone())
    assert torch.equal(*found) and float(found[0].abs().max()) > 0
    monkeypatch.undo()
    rows, weight = torch.randn(3, tiny.WIDTH), student.vocab_projector.weight
    with model.student.weight_cast_cache():
        first = model.student.head(rows).rounded
        assert first.dtype == torch.bfloat16 and model.student.head(rows).rounded is first
    torch.optim.AdamW(student.parameters(), lr=0.1, fused=True).step()
    with model.student.weight_cast_cache():
        assert torch.equal(model.student.head(rows).rounded, weight.bfloat16())


HOT, SHORT, LONG = {"start": 4.0, "end": 1.0}, {"epochs": 1}, {"epochs": None, "steps": 10_000}


@pytest.mark.parametrize(
    ("train", "device", "asks", "settings", "expected"),
    [
        ({"epochs": None, "minutes": 1.0}, "cpu", False, {}, False),
        ({"epochs": None, "minutes": 10.0}, "cpu", False, {}, True),
        ({"epochs": 1, "minutes": 60.0}, "cpu", False, {}, False),
        ({**LONG, "minutes": 1.0}, "cpu", False, {}, True),
        (SHORT, "cuda", False, {}, True),
        (LONG, "cpu", False, {"kernel": "fused"}, False),
        (SHORT, "cpu", True, {"kernel": "fused", "soft": HOT}, True),
        (SHORT, "cpu", True, {"temperature": HOT}, False),
    ],
)
def test_long_runs_are_compiled(train: Any, device: str, asks: bool, settings: Any, expected: bool) -> None:
    """By their steps, where they have any, and else by the clock; a temperature is a constant of the code."""
    config = Config(objective=objective_config(**settings), precision=PrecisionConfig(compile=asks))
    config = config.changed(train=config.train.changed(**train))
    batches: Any = SimpleNamespace(sequences_per_step=8, sequences=np.zeros((80, 128), np.uint16))
    ranks: Any = SimpleNamespace(device=torch.device(device))
    steps, terms = total_steps(config.train, 10), make_terms(config.objective)
    assert whole_run.make_objective(config, terms, batches, steps, 6144, ranks).compiled == expected


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


# --- weights and temperatures that follow a schedule

SOFT, MLM = {"start": 5.0, "end": 1.0}, {"start": 0.0, "end": 2.0, "shape": "cosine"}


def scheduled(**more: Any) -> ObjectiveConfig:
    return objective_config(soft=SOFT, mlm=MLM, temperature=HOT, **more)


def constant(progress: float) -> ObjectiveConfig:
    """What `scheduled` is at that progress, worked out here."""
    mlm = 2.0 * 0.5 * (1 - np.cos(np.pi * progress))
    return objective_config(soft=5 - 4 * progress, mlm=float(mlm), temperature=4 - 3 * progress)


def test_a_training_is_that_of_the_numbers_of_each_step(
    tokenizer: Any, teacher: Any, rows: np.ndarray, tmp_path: Path
) -> None:
    settings = TrainConfig(batch_size=4, accumulate=2, epochs=None, steps=4)
    fit = Fit(tmp_path, tokenizer, rows, teacher, new_student(), scheduled(), settings, **plain_sgd())
    fit.run()
    student = new_student()
    optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
    for step, line in enumerate(fit.logs):
        progress = (step + 0.5) / 4
        numbers = constant(progress)
        names = {"weight/soft", "weight/mlm", "temperature/soft"}
        assert {name for name in line if name.split("/")[0] in ("weight", "temperature")} == names
        assert line["weight/soft"] == 5.0 - 4.0 * progress and line["temperature/soft"] == 4.0 - 3.0 * progress
        assert line["weight/mlm"] == pytest.approx(numbers.terms["mlm"].weight)
        parts = [line[f"weight/{name}"] * line[f"loss/{name}"] for name in ("soft", "mlm")]
        assert line["loss/total"] == pytest.approx(sum(parts) + line["loss/cosine"], rel=1e-12)
        optimizer.zero_grad()
        loss, _ = loss_of(make_objective(numbers, student, teacher), student, teacher, fit.batches.window(step))
        loss.backward()
        assert line["loss/total"] == pytest.approx(float(loss.detach()), rel=1e-5)
        optimizer.step()
    assert_close(weights_of(fit.student), weights_of(student), rtol=1e-4, atol=1e-6)


def test_totals_of_several_steps_are_of_the_weights_in_force_in_each() -> None:
    tally = RunningMean()
    tally.add({"soft": 6.0, "mlm": 2.0}, {"soft": 3.0, "mlm": 2.0}, {"soft": 5.0, "mlm": 0.0})
    tally.add({"soft": 2.0, "mlm": 3.0}, {"soft": 1.0, "mlm": 3.0}, {"soft": 1.0, "mlm": 2.0})
    total = (5 * 6 + 1 * 2) / 4 + (0 * 2 + 2 * 3) / 5
    assert tally.means(["soft", "mlm"]) == {"total": total, "soft": 2.0, "mlm": 1.0}


@pytest.mark.parametrize("step", [1, 4])
def test_going_on_is_bitwise_the_same(
    tmp_path: Path, tokenizer: Any, teacher: Any, rows: np.ndarray, step: int
) -> None:
    def fit(folder: str, seed: int = 5) -> Fit:
        made = make_fit(tmp_path / folder, tokenizer, rows, teacher, seed)
        made.objective = scheduled(masking=made.objective.masking)
        made.__post_init__()
        return made

    whole, first = fit("whole"), fit("parts")
    whole.run()
    killed_after(first, step)
    second = fit("parts", seed=99).resume()
    second.run()
    assert_close(weights_of(second.student), weights_of(whole.student), rtol=0, atol=0)
    assert first.losses() + second.losses() == whole.losses()
    assert first.epochs[: step // 3] + second.epochs == whole.epochs


def test_a_weight_that_is_zero_at_one_end_keeps_its_term() -> None:
    for weight, kept in (({"start": 0.0, "end": 1.0}, True), ({"start": 1.0, "end": 0.0}, True), (0.0, False)):
        assert ("cosine" in make_terms(objective_config(cosine=weight))) == kept
    assert "cosine" not in make_terms(objective_config(cosine={"start": 0.0, "end": 0.0}))


def test_the_temperature_of_the_objective_reaches_terms_without_one_of_their_own() -> None:
    terms = {"reverse_kl": {}, "jsd": {"temperature": 1.5}, "logit_mse": {}, "mlm": {}, "other": {"kind": "soft"}}
    made = make_terms(named_terms(temperature=3.0, **terms))
    assert made["reverse_kl"].temperature == made["other"].temperature == made["other"].top_k_temperature == 3.0
    assert made["jsd"].temperature == 1.5 and not hasattr(made["logit_mse"], "temperature")
    settings = named_terms(temperature=HOT, **terms)
    assert {name: settings.schedule_of(name) for name in terms if settings.schedule_of(name)} == {
        name: WeightSchedule(**HOT) for name in ("reverse_kl", "other")
    }
    objective = make_objective(settings, make_model("bert", 1), make_model("bert", 1))
    made = dict(objective.terms)
    objective.begin_step(1.0)
    assert [objective.terms[name].temperature for name in ("other", "jsd")] == [1.0, 1.5]
    assert made["other"].temperature == 4.0, "a term is never changed from outside"


def test_a_run_logs_and_records_what_is_in_force_and_cannot_be_continued(
    shelf: Shelf, capfd: pytest.CaptureFixture
) -> None:
    folder = shelf.root / "scheduled"
    settings = ["objective.soft.weight={start: 5.0, end: 1.0}", "schedule=constant", "schedule.warmup=0"]
    settings += ["objective.temperature={start: 4, end: 1, shape: cosine}"]
    assert shelf.run(folder, *settings, "train.epochs=1") == 0
    lines, content = metrics(folder), results(folder)
    assert [line["weight/soft"] for line in lines] == pytest.approx([4.5, 3.5, 2.5, 1.5])
    temperatures = [line["temperature/soft"] for line in lines]
    assert 4 > temperatures[0] > temperatures[1] > 2.5 > temperatures[2] > temperatures[3] > 1
    assert content["objective"]["terms"]["soft"] == {
        "title": "Soft targets",
        "weight": {"start": 5.0, "end": 1.0, "shape": "linear"},
        "temperature": {"start": 4.0, "end": 1.0, "shape": "cosine"},
    }
    assert content["objective"]["terms"]["mlm"]["weight"] == 2.0
    totals = [line["loss/total"] for line in lines]
    assert min(totals) < content["history"][0]["loss"]["total"] < max(totals)
    capfd.readouterr()
    assert shelf.run(folder, *settings, "train.epochs=2") == 2
    assert "train.epochs was 1 and is now 2" in capfd.readouterr().err
    cached = ["teacher.cache.top_k=8", "objective.masking.static=true", "objective.cosine.weight=0"]
    assert shelf.run(shelf.root / "scheduled-cache", *settings, *cached) == 2
    assert "teacher.cache.top_k=8: kept at one temperature" in capfd.readouterr().err
