"""Schedules that rise, fall and reach their end; those that cannot be are refused."""

import math
from typing import Any

import pytest

from distill.compose import schedule_config
from distill.errors import SettingError
from distill.schedule import make_schedule

KINDS: dict[str, Any] = {
    "linear": lambda x: 1 - x,
    "cosine": lambda x: (1 + math.cos(math.pi * x)) / 2,
    "constant": lambda x: 1.0,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("warmup", [0.0, 0.05, 0.5])
@pytest.mark.parametrize("floor", [0.0, 0.1])
def test_schedules(kind: str, warmup: float, floor: float) -> None:
    ends = {} if kind == "constant" else {"floor": floor}
    schedule = make_schedule(schedule_config({"kind": kind, "warmup": warmup, **ends}))
    for progress in (0.0, 0.01, 0.2, 0.5, 0.77, 1.0):
        if progress < warmup:
            expected = progress / warmup
        else:
            expected = floor + (1 - floor) * KINDS[kind]((progress - warmup) / (1 - warmup))
        assert schedule(progress) == pytest.approx(expected, abs=1e-12)
    assert schedule(warmup) == pytest.approx(1.0)
    assert schedule(1.0) == pytest.approx(1.0 if kind == "constant" else floor)


def test_a_run_that_is_all_warmup() -> None:
    schedule = make_schedule(schedule_config({"kind": "linear", "warmup": 1.0}))
    assert schedule(0.999) == pytest.approx(0.999) and 0 <= schedule(1.0) <= 1


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"kind": "stairs"}, ["schedule.kind=stairs", "constant, cosine, linear", "schedule._target_"]),
        ({"warmup": 1.1}, ["schedule.warmup=1.1", "from 0 to 1"]),
        ({"floor": -0.1}, ["schedule.floor=-0.1", "from 0 to 1"]),
        ({"warmup": "soon"}, ["schedule.warmup", "soon"]),
        ({"kind": "constant", "floor": 0.1}, ["schedule.floor is no setting", "Constant", "warmup"]),
        ({"_target_": "own_parts.Nothing"}, ["schedule._target_=own_parts.Nothing", "imported"]),
        ({"_target_": "own_parts.Triangle", "top": 1}, ["schedule.top is no setting", "peak"]),
        ({"_target_": "own_parts.triangle", "progress": 0.5}, ["gives a float", "__call__(self, progress)"]),
        ({"_target_": "own_parts.Triangle", "peak": 1.0}, ["own_parts.Triangle fails at progress 0", "division"]),
        ({"_target_": "own_parts.Triangle", "peak": -1.0}, ["gives -", "at progress 0.01", "at least 0"]),
    ],
)  # fmt: skip
def test_schedules_that_cannot_be_are_refused(settings: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(SettingError) as error:
        make_schedule(schedule_config(settings))
    text = str(error.value)
    assert "\n" not in text and all(word in text for word in words), text
