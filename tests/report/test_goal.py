"""`optimize`: which number a name stands for, and the names and directions that are refused."""

from collections import namedtuple
from enum import Enum
from typing import Any

import pytest
from made_runs import results_of

from distill.report.comparison.goal import Goal
from distill.runs.facts import Profile
from distill.runs.record import Record
from distill.runtime.errors import SettingError

Measure = namedtuple("Measure", "name title lower_is_better")
MEASURES = [Measure("perplexity", "Perplexity", True), Measure("accuracy", "Accuracy", False)]


class Direction(Enum):
    minimize = 1
    maximize = 2


@pytest.mark.parametrize(
    "name, value",
    [
        ("perplexity", 3.0),
        ("imdb.perplexity", 4.0),
        ("heldout.top1", 0.5),
        ("training.seconds", 10.0),
        ("loss.total", 1.5),
        ("parameters", 1000),
    ],
)
def test_a_name_is_a_number_of_the_results(name: str, value: float) -> None:
    found = Record.from_json(results_of({"heldout": 3.0, "imdb": 4.0}, agreement={"heldout": {"top1": 0.5, "kl": 0.1}}))
    goal = Goal.of(name)
    assert goal is not None and goal.value(found) == value


def test_a_number_that_is_missing_is_none() -> None:
    goal = Goal("perplexity")
    assert goal.value(Record(recipe="smoke", profile=Profile())) is None, "a run that ended with its profile"
    results = results_of({"heldout": 1.0}, training={"final_loss": {"total": None}})
    assert Goal("loss.total").value(Record.from_json(results)) is None


def test_names_are_checked_before_the_training() -> None:
    for name in ("perplexity", "heldout.accuracy", "heldout.kl", "loss.soft", "training.seconds"):
        Goal(name).check(MEASURES, ["heldout"], ["soft"], compares=True)
    for name, says in [
        ("heldout.acuracy", "did you mean heldout.accuracy"),
        ("imdb.perplexity", "choose one of perplexity, accuracy"),
        ("nothing", "not a number of this run"),
    ]:
        with pytest.raises(SettingError, match=rf"optimize={name} .*{says}"):
            Goal(name).check(MEASURES, ["heldout"], ["soft"], compares=True)
    with pytest.raises(SettingError, match=r"optimize=heldout\.kl"):
        Goal("heldout.kl").check(MEASURES, ["heldout"], [], compares=False)


def test_a_search_in_the_wrong_direction_is_refused() -> None:
    for direction in ("minimize", Direction.minimize):
        goal = Goal.of("accuracy", direction)
        assert goal is not None
        with pytest.raises(SettingError, match=r"highest is best: set hydra\.sweeper\.direction=maximize"):
            goal.check(MEASURES, ["heldout"], [], compares=False)
    Goal("accuracy", "maximize").check(MEASURES, ["heldout"], [], compares=False)


@pytest.mark.parametrize("optimize, direction", [(3, None), ("", None), (["a"], None), ("perplexity", ["minimize"])])
def test_what_is_no_name_is_refused(optimize: Any, direction: Any) -> None:
    with pytest.raises(SettingError):
        Goal.of(optimize, direction)
    assert Goal.of(None, ["minimize", "maximize"]) is None
