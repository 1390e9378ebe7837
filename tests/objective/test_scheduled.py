"""Weights and temperatures that follow a schedule: their values by step, the gradient, the totals, resuming."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
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

from distill.config.objective import WeightSchedule, is_zero, value_at
from distill.config.settings import ObjectiveConfig, PrecisionConfig, TrainConfig
from distill.objective.build import build_objective, make_terms
from distill.objective.running_mean import RunningMean
from distill.runtime.errors import SettingError

SOFT, MLM, TEMPERATURE = {"start": 5.0, "end": 1.0}, {"start": 0.0, "end": 2.0, "shape": "cosine"}, (4.0, 1.0)
HOT = {"start": TEMPERATURE[0], "end": TEMPERATURE[1]}


def scheduled(**more: Any) -> ObjectiveConfig:
    return objective_config(soft=SOFT, mlm=MLM, temperature=HOT, **more)


def constant(progress: float, **more: Any) -> ObjectiveConfig:
    """What `scheduled` is at that progress, worked out here."""
    mlm = 2.0 * 0.5 * (1 - np.cos(np.pi * progress))
    return objective_config(soft=5 - 4 * progress, mlm=float(mlm), temperature=4 - 3 * progress, **more)


def test_a_ramp() -> None:
    line, curve = WeightSchedule(start=4.0, end=1.0), WeightSchedule(start=4.0, end=1.0, shape="cosine")
    assert [line(x) for x in (0.0, 0.25, 0.5, 1.0)] == [4.0, 3.25, 2.5, 1.0]
    assert [curve(x) for x in (0.0, 0.5, 1.0)] == [4.0, 2.5, 1.0] and 3.25 < curve(0.25) < 4.0
    assert value_at(line, 0.5) == value_at(2.5, 0.1) == 2.5
    assert (
        is_zero(0.0)
        and is_zero(WeightSchedule(start=0.0, end=0.0))
        and not is_zero(WeightSchedule(start=0.0, end=1.0))
        and not is_zero(WeightSchedule(start=1.0, end=0.0))
    )


@pytest.mark.parametrize("progress", [0.0, 0.3, 1.0])
def test_value_and_gradient_are_those_of_the_numbers_in_force(
    tokenizer: Any, teacher: Any, rows: np.ndarray, progress: float, tmp_path: Path
) -> None:
    batches = Fit(tmp_path, tokenizer, rows, teacher).batches.window(0)
    student = make_model("distilbert", 1, seed=2)
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


def test_constant_numbers_are_not_logged(tokenizer: Any, teacher: Any, rows: np.ndarray, tmp_path: Path) -> None:
    fit = Fit(
        tmp_path, tokenizer, rows, teacher, settings=TrainConfig(batch_size=4, accumulate=2, epochs=None, steps=1)
    )
    fit.run()
    assert not [name for name in fit.logs[0] if name.startswith(("weight", "temperature"))]


def test_totals_of_several_steps_are_of_the_weights_in_force_in_each() -> None:
    tally = RunningMean()
    tally.add({"soft": 6.0, "mlm": 2.0}, {"soft": 3.0, "mlm": 2.0}, {"soft": 5.0, "mlm": 0.0})
    tally.add({"soft": 2.0, "mlm": 3.0}, {"soft": 1.0, "mlm": 3.0}, {"soft": 1.0, "mlm": 2.0})
    assert tally.means(["soft", "mlm"]) == {
        "total": (5 * 6 + 1 * 2) / 4 + (0 * 2 + 2 * 3) / 5, "soft": 2.0, "mlm": 1.0
    }  # fmt: skip


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
    for weight in ({"start": 0.0, "end": 1.0}, {"start": 1.0, "end": 0.0}):
        assert "cosine" in make_terms(objective_config(cosine=weight))
    assert "cosine" not in make_terms(objective_config(cosine={"start": 0.0, "end": 0.0}))


def test_a_scheduled_temperature_is_not_compiled() -> None:
    def built(**settings: Any) -> bool:
        config = objective_config(**settings)
        many, precision = 10**9, PrecisionConfig(compile=True)
        return build_objective(make_terms(config), config, precision, 100, many, torch.device("cpu")).compiled

    assert built() and built(soft=SOFT) and not built(temperature=HOT)


def test_a_temperature_of_one_term_alone() -> None:
    config = named_terms(**{"soft": {"weight": 1.0, "temperature": HOT}, "other": {"kind": "soft", "temperature": 3.0}})
    terms = make_terms(config)
    objective = build_objective(terms, config, PrecisionConfig(), 100, 1, torch.device("cpu"))
    objective.begin_step(1.0)
    assert [objective.terms[name].temperature for name in ("soft", "other")] == [1.0, 3.0]
    assert terms["soft"].temperature == 4.0, "a term is never changed from outside"
    assert objective.scheduled() == {"temperature/soft": 1.0}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"mlm": {"weight": {"start": 1.0}}}, ["objective.mlm.weight", "end"]),
        ({"mlm": {"weight": {"start": 1.0, "end": 0.0, "stop": 2.0}}}, ["objective.mlm.weight", "stop"]),
        ({"mlm": {"weight": {"start": 1.0, "end": "low"}}}, ["objective.mlm.weight", "low"]),
        ({"mlm": {"weight": {"start": 1.0, "end": 0.0, "shape": "wave"}}}, ["objective.mlm.weight", "wave", "cosine"]),
        ({"mlm": {"weight": [1.0, 0.0]}}, ["objective.mlm.weight=[1.0, 0.0]", "valid number"]),
        ({"temperature": "hot"}, ["objective.temperature=hot", "number"]),
        ({"soft": {"temperature": {"start": 0.0, "end": 1.0}}}, ["objective.soft.temperature.start=0.0", "from 0.01"]),
        (
            {"mine": {"_target_": "own_parts.Tempered", "temperature": HOT}},
            ["objective.mine.temperature", "own_parts.Tempered", "self.temperature"],
        ),
    ],
)
def test_schedules_that_cannot_be_are_refused(settings: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(SettingError) as error:
        make_terms(named_terms(**settings))
    text = str(error.value)
    assert "\n" not in text and all(word in text for word in words), text
