"""Schedules that rise, fall and reach their end; those that cannot be are refused."""

import math
from typing import Any

import pytest
from tiny import schedule_config

from distill.optim.schedule import Limits, make_schedule
from distill.runtime.errors import SettingError

KINDS: dict[str, Any] = {
    "linear": lambda x: 1 - x,
    "cosine": lambda x: (1 + math.cos(math.pi * x)) / 2,
    "constant": lambda x: 1.0,
    "polynomial": lambda x: 1 - x,  # of power 1
}


def make(given: dict[str, Any], total_steps: int | None = None, peak_lr: float = 1.0) -> Any:
    return make_schedule(schedule_config(given), total_steps, peak_lr)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("warmup", [0.0, 0.05, 0.5])
@pytest.mark.parametrize("floor", [0.0, 0.1])
def test_schedules(kind: str, warmup: float, floor: float) -> None:
    ends = {} if kind == "constant" else {"floor": floor}
    schedule = make({"kind": kind, "warmup": warmup, **ends})
    for progress in (0.0, 0.01, 0.2, 0.5, 0.77, 1.0):
        if progress < warmup:
            expected = progress / warmup
        else:
            expected = floor + (1 - floor) * KINDS[kind]((progress - warmup) / (1 - warmup))
        assert schedule(progress) == pytest.approx(expected, abs=1e-12)
    assert schedule(warmup) == pytest.approx(1.0)
    assert schedule(1.0) == pytest.approx(1.0 if kind == "constant" else floor)


@pytest.mark.parametrize("kind", KINDS)
def test_a_rise_in_steps_is_the_same_as_its_fraction(kind: str) -> None:
    by_fraction, by_steps = (
        make({"kind": kind, "warmup": 0.25}),
        make({"kind": kind, "warmup": 0.0, "warmup_steps": 5}, 20),
    )
    for step in range(20):
        progress = Limits(20, math.inf, False).progress(step, 0.0)
        assert by_steps(progress) == by_fraction(progress)
        if step < 5:
            assert by_steps(progress) == pytest.approx((step + 0.5) / 5)
    assert (
        make({"kind": kind, "warmup": 0.0})(0.0) == make({"kind": kind, "warmup": 0.0, "warmup_steps": 0}, 20)(0.0) == 1
    )


@pytest.mark.parametrize("kind", sorted(KINDS.keys() - {"constant"}))
def test_an_end_value_as_a_rate(kind: str) -> None:
    schedule = make({"kind": kind, "floor": 0.0, "end_lr": 3e-5}, peak_lr=1.76e-3)
    assert 1.76e-3 * schedule(1.0) == pytest.approx(3e-5) and schedule(0.05) == pytest.approx(1.0)


@pytest.mark.parametrize("power", [0.5, 1.0, 2.0])
def test_polynomial(power: float) -> None:
    schedule = make({"kind": "polynomial", "warmup": 0.2, "power": power, "floor": 0.1})
    for progress in (0.2, 0.3, 0.77, 1.0):
        left = 1 - (progress - 0.2) / 0.8
        assert schedule(progress) == pytest.approx(0.1 + 0.9 * left**power)


def test_a_schedule_of_the_users_gets_what_it_takes() -> None:
    settings = schedule_config({"_target_": f"{__name__}.until", "end": 10})
    assert make_schedule(settings, 40, 0.5)(0.25) == 1 and make_schedule(settings, 40, 0.5)(0.26) == 0


def until(end: int, total_steps: int, peak_lr: float) -> Any:
    assert peak_lr == 0.5
    return lambda progress: float(progress <= end / total_steps)


def test_a_run_that_is_all_warmup() -> None:
    schedule = make({"kind": "linear", "warmup": 1.0})
    assert schedule(0.999) == pytest.approx(0.999) and 0 <= schedule(1.0) <= 1


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"kind": "stairs"}, ["schedule.kind=stairs", "constant, cosine, linear, polynomial", "_target_"]),
        ({"warmup": 1.1}, ["schedule.warmup=1.1", "from 0 to 1"]),
        ({"floor": -0.1}, ["schedule.floor=-0.1", "from 0 to 1"]),
        ({"warmup": "soon"}, ["schedule.warmup", "soon"]),
        ({"warmup_steps": 5}, ["schedule.warmup_steps=5: set beside warmup=0.05", "warmup=0"]),
        ({"warmup": 0.0, "warmup_steps": 41}, ["schedule.warmup_steps=41", "from 0 to 40"]),
        ({"warmup": 0.0, "warmup_steps": -1}, ["schedule.warmup_steps=-1", "from 0 to 40"]),
        ({"floor": 0.1, "end_lr": 1e-5}, ["schedule.end_lr=1e-05: set beside floor=0.1", "floor=0"]),
        ({"end_lr": 0.6}, ["schedule.end_lr=0.6", "from 0 to 0.5"]),
        ({"end_lr": -0.6}, ["schedule.end_lr=-0.6", "from 0 to 0.5"]),
        ({"kind": "polynomial", "power": 0}, ["schedule.power=0.0", "above 0"]),
        ({"power": 2}, ["schedule.power: no setting", "Linear"]),
        ({"total_steps": 2}, ["schedule.total_steps: no setting", "Linear"]),
        ({"kind": "constant", "floor": 0.1}, ["schedule.floor: no setting", "Constant", "warmup"]),
        ({"_target_": "own_parts.Nothing"}, ["schedule._target_=own_parts.Nothing", "imported"]),
        ({"_target_": "own_parts.Triangle", "top": 1}, ["schedule.top: no setting", "peak"]),
        ({"_target_": "own_parts.triangle", "progress": 0.5}, ["gives a float", "__call__(self, progress)"]),
        ({"_target_": "own_parts.Triangle", "peak": 1.0}, ["own_parts.Triangle fails at progress 0", "division"]),
        ({"_target_": "own_parts.Triangle", "peak": -1.0}, ["gives -", "at progress 0.01", "at least 0"]),
    ],
)  # fmt: skip
def test_schedules_that_cannot_be_are_refused(settings: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(SettingError) as error:
        make(settings, 40, 0.5)
    text = str(error.value)
    assert "\n" not in text and all(word in text for word in words), text


def test_steps_in_a_run_that_the_clock_ends_are_refused() -> None:
    with pytest.raises(SettingError, match=r"^schedule\.warmup_steps=5: .*train\.minutes.*fraction$"):
        make({"warmup": 0.0, "warmup_steps": 5}, None)
