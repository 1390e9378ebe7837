"""Settings that no run can have: each is refused with one line that names setting, value and cure."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import tiny
import torch
from tiny import change

from distill.config import compose
from distill.config.settings import (
    Config,
    LayersStudentConfig,
    NewStudentConfig,
    NoTeacherConfig,
    SavedTeacherConfig,
    SourceConfig,
)
from distill.config.weight_schedule import WeightSchedule
from distill.distributed.bucket import MAX_STATS
from distill.objective.terms.soft import Soft
from distill.runs.check import MOST_TERMS, check
from distill.runs.step import StepStats
from distill.runtime.errors import SettingError
from distill.runtime.signals import ALL


def make() -> Config:
    return Config(
        corpus=tiny.corpus_config(kind="text", path="."),
        teacher=SavedTeacherConfig(path="x"),
        student=LayersStudentConfig(),
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


BAD = [
    ("teacher.micro_batches", 0),
    ("objective.soft.weight", -1.0),
    ("objective.mlm.weight", math.nan),
    ("objective.mlm.weight", WeightSchedule(start=1.0, end=-1.0)),
    ("objective.mlm.weight", {"start": math.inf, "end": 1.0}),
    ("objective.temperature", WeightSchedule(start=0.0, end=1.0)),
    ("objective.temperature", 0.0),
    ("objective.temperature", math.nan),
    ("objective.soft.cutoff", -0.1),
    ("objective.soft.cutoff", 1.0),
    ("objective.masking.mlm_probability", 0.0),
    ("objective.masking.mlm_probability", 1.5),
    ("objective.masking.mask", -0.1),
    ("objective.masking.keep", 0.3),
    ("objective.masking.smoothing", -1.0),
    ("train.batch_size", 0),
    ("train.accumulate", 0),
    ("train.epochs", 0),
    ("train.steps", 0),
    ("train.minutes", 0.0),
    ("train.log_every", 0),
    ("train.snapshots", [10, 0]),
    ("train.snapshot_every", 0),
    ("evaluate.every_steps", 0),
    ("train.save_every", 0),
    ("train.keep", 0),
    ("train.max_nonfinite", 0),
    ("train.workers", -1),
    ("optimizer.lr", 0.0),
    ("optimizer.lr", math.nan),
    ("optimizer.eps", 0.0),
    ("optimizer.clip", 0.0),
    ("optimizer.scale_lr", "cubic"),
    ("optimizer.scale_lr", "linear"),
    ("optimizer.base_batch", 0),
    ("optimizer.base_batch", 256),
    ("optimizer.weight_decay", -0.1),
    ("optimizer.betas", (0.9, 1.0)),
    ("schedule.warmup", 1.1),
    ("schedule.floor", -0.1),
    ("schedule.warmup_steps", 100),
    ("schedule.end_lr", 1e-3),
    ("student.dropout", 1.5),
    ("precision.student", "fp8"),
    ("precision.student", "int8"),
    ("precision.teacher", "fp8"),
    ("precision.evaluate", "int8"),
    ("precision.evaluate", "half"),
    ("tracker.mode", "telepathy"),
    ("evaluate.max_sequences", 0),
    ("evaluate.batch_size", 0),
    ("evaluate.stride", 0),
    ("evaluate.stride", 128),
    ("evaluate.pseudo_perplexity.fraction", 1.01),
    ("evaluate.pseudo_perplexity.batch_size", 0),
    ("corpus.kind", "heldout"),
    ("corpus.sequence_length", 4),
    ("corpus.max_sequences", 0),
    ("corpus.vocab_size", 10),
    ("data.workers", 0),
    ("data.shuffle_bytes", 0),
    ("data.local_bytes", 1 << 32),  # less than twice the default of data.shuffle_bytes
    ("corpus.fraction", 2.0),
    ("corpus.heldout", 1.0),
    ("teacher.kind", "borrowed"),
    ("teacher.cache.top_k", 0),
    ("teacher.cache.sampled", 0),
    ("teacher.cache.exponent", 0.0),
    ("teacher.cache.exponent", 1.5),
    ("teacher.cache.seed", -1),
    ("teacher.cache.gigabytes", 0.0),
    ("student.init", "grown"),
    ("tracker.kind", "pigeon"),
]


@pytest.mark.parametrize(("setting", "value"), BAD)
def test_values_out_of_range_are_refused_by_name(setting: str, value: Any) -> None:
    text = refused(lambda: change(make(), setting, value))
    shown = list(value) if isinstance(value, tuple) else getattr(value, "value", value)
    if isinstance(value, WeightSchedule | dict):
        shown = next(number for number in dict(value).values() if not 0 < number < math.inf)
    assert setting.rsplit(".", 1)[1] in text and str(shown) in text
    assert setting.split(".", 1)[0] in text


GOOD = [
    ("train.epochs", None),
    ("train.minutes", 0.5),
    ("optimizer.clip", None),
    ("optimizer.weight_decay", 0.0),
    ("objective.cosine.weight", 0.0),
    ("objective.cosine.weight", WeightSchedule(start=0.0, end=1.0)),
    ("objective.temperature", WeightSchedule(start=4.0, end=1.0)),
    ("objective.masking.smoothing", 0.0),
    ("schedule.warmup", 0.0),
    ("evaluate.max_sequences", 1),
    ("evaluate.pseudo_perplexity.fraction", 0.0),
    ("precision.student", "bf16"),
    ("precision.teacher", "int8"),
    ("train.workers", 0),
]


@pytest.mark.parametrize(("setting", "value"), GOOD)
def test_values_at_the_edge_pass(setting: str, value: Any) -> None:
    config = make()
    config = change(config, setting, value)
    if setting == "train.epochs":
        config = change(config, "train.steps", 5)
    check(config)


def test_a_rise_in_steps_needs_a_length_in_steps() -> None:
    config = make()
    config = change(change(config, "schedule.warmup", 0.0), "schedule.warmup_steps", 100)
    check(config)  # with epochs, whose steps the corpus will say
    config = change(config, "train.steps", 99)
    assert "schedule.warmup_steps=100 must be from 0 to 99" in refused(config)
    config = change(config, "train.steps", 200)
    config = change(config, "train.minutes", 5.0)
    assert all(word in refused(config) for word in ("schedule.warmup_steps=100", "train.minutes"))


def test_a_learning_rate_that_grows_needs_a_batch_that_it_is_meant_for() -> None:
    config = make()
    config = change(config, "optimizer.scale_lr", "sqrt")
    config = change(config, "optimizer.base_batch", 256)
    change(config, "schedule.end_lr", 1.0)  # whether that is too much depends on the rows of a step
    check(config)
    config = change(config, "optimizer.scale_lr", "none")
    assert all(word in refused(config) for word in ("optimizer.scale_lr=none", "optimizer.base_batch=256"))


def test_ranks_clip_by_a_norm_and_once() -> None:
    config = make()
    config = change(config, "optimizer.clip_each_rank", True)
    check(config)
    config = change(config, "backend.sync", "every")
    assert all(word in refused(config) for word in ("clip_each_rank=true", "backend.sync=window"))
    config = change(config, "backend.sync", "window")
    config = change(config, "optimizer.clip", None)
    assert all(word in refused(config) for word in ("clip_each_rank=true", "optimizer.clip=null"))


def test_a_run_without_an_end_is_refused() -> None:
    config = make()
    config = change(config, "train.epochs", None)
    assert all(name in refused(config) for name in ("train.epochs", "train.steps", "train.minutes"))
    config = change(config, "train.minutes", 1.0)
    check(config)


def test_an_objective_without_terms_is_refused() -> None:
    config = make()
    for name in ("soft", "mlm", "cosine"):
        config = change(config, f"objective.{name}.weight", 0.0)
    assert "objective" in refused(config)


def test_no_teacher_but_terms_that_ask_one() -> None:
    config = make()
    config = change(config, "teacher", NoTeacherConfig())
    config = change(config, "student", NewStudentConfig(architecture="bert"))
    assert "teacher.kind=none" in refused(config)
    config = change(config, "objective.soft.weight", 0.0)
    config = change(config, "objective.cosine.weight", 0.0)
    check(config)


def test_heldout_set_without_heldout_documents() -> None:
    config = make()
    config = change(config, "corpus.heldout", 0.0)
    assert "corpus.heldout=0" in refused(config)
    books = SourceConfig(kind="bundled")  # of which two others are held out
    check(config.changed(corpus=config.corpus.changed(source=books)))
    config = change(config, "evaluate.sets", ["wikitext2"])
    check(config)


def test_shares_of_evaluation_sources() -> None:
    sources = {"imdb": {"kind": "imdb", "fraction": -1.0}}
    with pytest.raises(SettingError, match=r"evaluate\.sources\.imdb\.fraction=-1\.0"):
        compose.evaluate_config({"sources": sources})


def cached() -> Config:
    config = make()
    config = change(config, "teacher.cache.top_k", 8)
    config = change(config, "objective.masking.static", True)
    config = change(config, "objective.cosine.weight", 0.0)
    return config


@pytest.mark.parametrize(
    ("setting", "value", "cure"),
    [
        ("objective.masking.static", False, "objective.masking.static=true"),
        ("objective.cosine.weight", 1.0, "objective.cosine.weight=0"),
        ("objective.soft.weight", 0.0, "top_k to null"),
        ("objective.soft.cutoff", 0.01, "objective.soft.cutoff=0.01 to 0"),
    ],
)
def test_a_teacher_cache_and_what_it_cannot_hold(setting: str, value: Any, cure: str) -> None:
    check(cached())
    config = cached()
    config = change(config, setting, value)
    text = refused(config)
    assert "teacher.cache.top_k=8" in text and cure in text
    config = change(config, "teacher.cache.top_k", None)
    check(config)


def test_draws_of_a_teacher_cache() -> None:
    config = cached()
    config = change(config, "teacher.cache.top_k", None)
    config = change(config, "teacher.cache.sampled", 12)
    config = change(config, "teacher.cache.exponent", 0.8)
    check(config)
    config = change(config, "objective.masking.static", False)
    assert "teacher.cache.sampled=12 needs the same masks" in refused(config)
    config = change(config, "objective.masking.static", True)
    config = change(config, "teacher.cache.top_k", 8)
    config = change(config, "objective.soft.weight", 0.0)
    text = refused(config)
    assert (
        "teacher.cache.top_k=8 with teacher.cache.sampled=12, but no term" in text
        and "top_k and sampled to null" in text
    )
    config = change(config, "objective.soft.weight", 1.0)
    config = change(config, "objective.soft.cutoff", 0.01)
    assert refused(config).endswith("sampled targets cannot be cut off: set objective.soft.cutoff=0.01 to 0")
    config = change(config, "objective.soft.cutoff", 0.0)
    config = change(config, "objective.cosine.weight", 1.0)
    assert "objective.cosine needs more of the teacher than a cache keeps" in refused(config)


@pytest.mark.parametrize(("name", "value", "default"), [("exponent", 0.8, "1.0"), ("seed", 3, "0")])
def test_settings_of_draws_where_nothing_is_drawn(name: str, value: Any, default: str) -> None:
    text = refused(lambda: change(cached(), f"teacher.cache.{name}", value))
    assert f"teacher.cache.{name}={value}" in text and "set teacher.cache.sampled" in text and f"to {default}" in text
    config = change(cached(), "teacher.cache.sampled", 12)
    check(change(config, f"teacher.cache.{name}", value))


def test_a_term_that_reads_no_draws_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    config = cached()
    monkeypatch.setattr(Soft, "reads_samples", False)
    check(config)
    config = change(config, "teacher.cache.sampled", 12)
    assert "objective.soft reads the most probable tokens alone" in refused(config)


def test_a_teacher_cache_is_at_one_temperature() -> None:
    config = cached()
    config = change(config, "objective.soft.temperature", WeightSchedule(start=4.0, end=1.0))
    text = refused(config)
    assert "teacher.cache.top_k=8" in text and "objective.soft.temperature goes from 4.0 to 1.0" in text
    config = change(config, "objective.soft.temperature", None)
    # Of the weight the cache holds nothing.
    config = change(config, "objective.soft.weight", WeightSchedule(start=5.0, end=1.0))
    check(config)


def test_a_schedule_of_the_users_is_tried_with_the_numbers_of_the_run_alone() -> None:
    """Steps by epochs and a rate that grows with the ranks are not there yet; what fails without them is refused."""
    table = compose.schedule_config({"_target_": "own_parts.Table"})
    by_epochs = make().changed(schedule=table)
    by_steps = change(change(by_epochs, "train.steps", 50), "train.epochs", None)
    check(by_epochs)
    check(by_steps)
    check(change(change(by_steps, "optimizer.scale_lr", "linear"), "optimizer.base_batch", 8))
    triangle = compose.schedule_config({"_target_": "own_parts.Triangle", "peak": 1.0})
    assert "own_parts.Triangle fails at progress 0" in refused(by_epochs.changed(schedule=triangle))
    unfit = compose.schedule_config({"_target_": "own_parts.Table", "peak": 1.0})
    assert "schedule.peak is no setting of own_parts.Table" in refused(by_epochs.changed(schedule=unfit))


def test_sets_are_held_out_by_their_kind_whatever_their_names() -> None:
    def without(name: str, **source: str) -> Config:
        evaluate = compose.evaluate_config({"sets": [name], "sources": {name: source}})
        return change(make(), "corpus.heldout", 0.0).changed(evaluate=evaluate)

    assert refused(without("rest", kind="heldout")).startswith("corpus.heldout=0, but evaluate.sets names rest: ")
    check(without("heldout", kind="text", path="."))


def test_a_mixture_has_a_part_of_each_source_in_each_set_that_is_held_out() -> None:
    text = {"kind": "text", "path": "."}
    corpus = tiny.corpus_config(kind="mixture", sources={name: {**text, "weight": 1.0} for name in ("one", "two")})

    def mixed(sets: str, *by_set: str) -> Config:
        given = {"sets": sets.split(), "sources": {"rest": {"kind": "heldout"}, "rest_one": text}}
        given["by_set"] = {name: {"max_sequences": 3} for name in by_set}
        return make().changed(corpus=corpus, evaluate=compose.evaluate_config(given))

    check(mixed("rest", "rest_two"))
    assert "evaluate.by_set.rest: a mixture has a held-out set of each source" in refused(mixed("rest", "rest"))
    assert "evaluate.sets names rest_one, the held-out set of a source" in refused(mixed("rest rest_one"))


def test_more_losses_than_travel_with_the_gradients_are_refused() -> None:
    def with_further(count: int) -> Config:
        further = {f"further{number}": {"kind": "mlm", "weight": 1.0} for number in range(count)}
        return make().changed(objective=tiny.objective_config(**further))  # besides soft, mlm and cosine

    check(with_further(MOST_TERMS - 3))
    assert f"objective has {MOST_TERMS + 1} losses, and a run takes at most {MOST_TERMS}" in refused(
        with_further(MOST_TERMS - 2)
    )
    counts = torch.zeros(MOST_TERMS + 1)
    assert len(StepStats.pack(counts[1:], counts, [0.0] * len(ALL), 0.0)) <= MAX_STATS
