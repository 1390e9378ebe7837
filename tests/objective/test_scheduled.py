"""Weights and temperatures that follow a schedule: their values by step, the gradient, the totals, resuming."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from job import Shelf, metrics, results
from naive import definition
from test_checkpoint import killed_after, make_fit
from tiny import (
    Fit,
    assert_close,
    loss_of,
    make_model,
    make_objective,
    named_terms,
    new_student,
    objective_config,
    plain_sgd,
    weights_of,
)

from distill.config.objective import WeightSchedule
from distill.config.settings import ObjectiveConfig, TrainConfig
from distill.objective.build import make_terms
from distill.objective.running_mean import RunningMean

SOFT, MLM, HOT = {"start": 5.0, "end": 1.0}, {"start": 0.0, "end": 2.0, "shape": "cosine"}, {"start": 4.0, "end": 1.0}


def scheduled(**more: Any) -> ObjectiveConfig:
    return objective_config(soft=SOFT, mlm=MLM, temperature=HOT, **more)


def constant(progress: float) -> ObjectiveConfig:
    """What `scheduled` is at that progress, worked out here."""
    mlm = 2.0 * 0.5 * (1 - np.cos(np.pi * progress))
    return objective_config(soft=5 - 4 * progress, mlm=float(mlm), temperature=4 - 3 * progress)


@pytest.mark.parametrize("progress", [0.0, 0.3, 1.0])
def test_value_and_gradient_are_those_of_the_numbers_in_force(
    tokenizer: Any, teacher: Any, rows: np.ndarray, progress: float, tmp_path: Path
) -> None:
    batches, student = Fit(tmp_path, tokenizer, rows, teacher).batches.window(0), make_model("distilbert", 1, seed=2)
    objective = make_objective(scheduled(), student, teacher)
    objective.begin_step(progress)
    loss, _ = loss_of(objective, student, teacher, batches)
    loss.backward()
    found = {name: p.grad.clone() for name, p in student.named_parameters()}
    student.zero_grad()
    expected, _ = definition(constant(progress), student, teacher, batches)
    expected.backward()
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-5)
    assert_close(found, {name: p.grad for name, p in student.named_parameters()}, rtol=1e-3, atol=2e-5)


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
