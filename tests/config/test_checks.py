"""Settings that no run can have: each is refused with one line that names setting, value and cure."""

from collections.abc import Callable

import pytest
import tiny
import torch
from tiny import change

from distill.config.errors import parse
from distill.config.settings import Config, EvaluateConfig, ScheduleConfig, StudentConfig, TeacherConfig
from distill.distributed.bucket import MAX_STATS
from distill.objective.terms.soft import Soft
from distill.runs.check import MOST_TERMS, check
from distill.runs.step import StepStats
from distill.runtime.errors import SettingError
from distill.runtime.signals import ALL


def conf_schedule(values: dict[str, object]) -> ScheduleConfig:
    return parse(ScheduleConfig, values, "schedule")


def make() -> Config:
    return Config(
        corpus=tiny.corpus_config(kind="text", path="."),
        teacher=TeacherConfig(path="x"),
        student=StudentConfig(),
        objective=tiny.objective_config(),
    )


def refused(config: Config | Callable[[], Config]) -> str:
    """The one line by which these settings are refused, when they are made or when they are checked together."""
    with pytest.raises(SettingError) as error:
        check(config if isinstance(config, Config) else config())
    text = str(error.value)
    assert error.value.status == 2 and "\n" not in text
    return text


def test_the_defaults_pass() -> None:
    check(make())


def cached() -> Config:
    config = make()
    config = change(config, "teacher.cache.top_k", 8)
    config = change(config, "objective.masking.static", True)
    config = change(config, "objective.cosine.weight", 0.0)
    return config


def test_a_term_that_reads_no_draws_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    config = cached()
    monkeypatch.setattr(Soft, "reads_samples", False)
    check(config)
    config = change(config, "teacher.cache.sampled", 12)
    assert "objective.soft reads the most probable tokens alone" in refused(config)


def test_a_schedule_of_the_users_is_tried_with_the_numbers_of_the_run_alone() -> None:
    """Steps by epochs and a rate that grows with the ranks are not there yet; what fails without them is refused."""
    table = conf_schedule({"_target_": "own_parts.Table"})
    by_epochs = make().changed(schedule=table)
    by_steps = change(change(by_epochs, "train.steps", 50), "train.epochs", None)
    check(by_epochs)
    check(by_steps)
    check(change(change(by_steps, "optimizer.scale_lr", "linear"), "optimizer.base_batch", 8))
    triangle = conf_schedule({"_target_": "own_parts.Triangle", "peak": 1.0})
    assert "own_parts.Triangle fails at progress 0" in refused(by_epochs.changed(schedule=triangle))
    unfit = conf_schedule({"_target_": "own_parts.Table", "peak": 1.0})
    assert "schedule.peak: no setting of own_parts.Table" in refused(by_epochs.changed(schedule=unfit))


def test_a_mixture_has_a_part_of_each_source_in_each_set_that_is_held_out() -> None:
    text = {"kind": "text", "path": "."}
    corpus = tiny.corpus_config(kind="mixture", sources={name: {**text, "weight": 1.0} for name in ("one", "two")})

    def mixed(sets: str, *by_set: str) -> Config:
        given = {"sets": sets.split(), "sources": {"rest": {"kind": "heldout"}, "rest_one": text}}
        given["by_set"] = {name: {"max_sequences": 3} for name in by_set}
        return make().changed(corpus=corpus, evaluate=parse(EvaluateConfig, given, "evaluate"))

    check(mixed("rest", "rest_two"))
    assert "evaluate.by_set.rest: a mixture has a held-out set of each source" in refused(mixed("rest", "rest"))
    assert "evaluate.sets: names rest_one, the held-out set of a source" in refused(mixed("rest rest_one"))


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
