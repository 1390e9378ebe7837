"""Settings that no run can have: each is refused with one line that names setting, value and cure."""

import pytest
import tiny
import torch
from tiny import change

from distill.config.errors import parse
from distill.config.settings import Config, ScheduleConfig, StudentConfig, TeacherConfig
from distill.distributed.bucket import MAX_STATS
from distill.objective.terms.soft import Soft
from distill.runs.check import MOST_TERMS, check
from distill.runs.step import StepStats
from distill.runtime.errors import SettingError
from distill.runtime.signals import ALL


def users_schedule(name: str, **more: float) -> ScheduleConfig:
    return parse(ScheduleConfig, {"_target_": f"own_parts.{name}", **more}, "schedule")


def make() -> Config:
    return Config(
        corpus=tiny.corpus_config(kind="text", path="."),
        teacher=TeacherConfig(path="x"),
        student=StudentConfig(),
        objective=tiny.objective_config(),
    )


def refused(config: Config) -> str:
    """The one line by which these settings are refused."""
    with pytest.raises(SettingError) as error:
        check(config)
    assert error.value.status == 2 and "\n" not in str(error.value)
    return str(error.value)


def test_a_term_that_reads_no_draws_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    config = change(change(make(), "teacher.cache.top_k", 8), "objective.masking.static", True)
    config = change(config, "objective.cosine.weight", 0.0)
    monkeypatch.setattr(Soft, "reads_samples", False)
    check(config)
    config = change(config, "teacher.cache.sampled", 12)
    assert "objective.soft reads the most probable tokens alone" in refused(config)


def test_a_schedule_of_the_users_is_tried_with_the_numbers_of_the_run_alone() -> None:
    """Steps by epochs and a rate that grows with the ranks are not there yet; what fails without them is refused."""
    table = users_schedule("Table")
    by_epochs = make().changed(schedule=table)
    by_steps = change(change(by_epochs, "train.steps", 50), "train.epochs", None)
    check(by_epochs)
    check(by_steps)
    check(by_steps.changed(optimizer=by_steps.optimizer.changed(scale_lr="linear", base_batch=8)))
    triangle = users_schedule("Triangle", peak=1.0)
    assert "own_parts.Triangle fails at progress 0" in refused(by_epochs.changed(schedule=triangle))
    unfit = users_schedule("Table", peak=1.0)
    assert "schedule.peak: no setting of own_parts.Table" in refused(by_epochs.changed(schedule=unfit))


def test_more_losses_than_travel_with_the_gradients_are_refused() -> None:
    def with_further(count: int) -> Config:
        further = {f"further{number}": {"kind": "mlm", "weight": 1.0} for number in range(count)}
        return make().changed(objective=tiny.objective_config(**further))  # besides soft, mlm and cosine

    check(with_further(MOST_TERMS - 3))
    assert f"objective: has {MOST_TERMS + 1} losses, and a run takes at most {MOST_TERMS}" in refused(
        with_further(MOST_TERMS - 2)
    )
    counts = torch.zeros(MOST_TERMS + 1)
    assert len(StepStats.pack(counts[1:], counts, [0.0] * len(ALL), 0.0)) <= MAX_STATS


def test_settings_of_the_same_name_in_two_sections_are_both_refused() -> None:
    with pytest.raises(SettingError) as raised:
        parse(Config, {"optimizer": {"kind": "sgdx"}, "schedule": {"kind": "wavy"}}, "")
    assert {error.setting for error in raised.value.refusals} == {"optimizer.kind", "schedule.kind"}
