"""`optimize`: which number a name stands for, and the names and directions that are refused."""

from collections import namedtuple
from enum import Enum
from types import SimpleNamespace
from typing import Any

import pytest
from job import whole_run
from made_runs import results_of

from distill.config.settings import TrainConfig
from distill.report.comparison.columns import Goal
from distill.runs.facts import Profile
from distill.runs.record import Record
from distill.runtime.errors import SettingError

Measure = namedtuple("Measure", "name title lower_is_better")
MEASURES = [Measure("perplexity", "Perplexity", True), Measure("accuracy", "Accuracy", False)]
WRONG_WAY = r"highest is best: set hydra\.sweeper\.direction=maximize"


class Direction(Enum):
    minimize = 1
    maximize = 2


def check(name: str, direction: Any = None, compares: bool = True, has_gap: bool = True) -> None:
    goal = Goal.of(name, direction)
    assert goal is not None
    goal.check(MEASURES, ["heldout", "imdb"], ["soft"], compares, has_gap)


NUMBERS = {"perplexity": 3.0, "imdb.perplexity": 4.0, "heldout.top1": 0.5, "training.seconds": 10.0, "loss.total": 1.5}


@pytest.mark.parametrize("name, value", [*NUMBERS.items(), ("parameters", 1000)])
def test_a_name_is_a_number_of_the_results(name: str, value: float) -> None:
    found = Record.from_json(results_of({"heldout": 3.0, "imdb": 4.0}, agreement={"heldout": {"top1": 0.5, "kl": 0.1}}))
    assert Goal(name).value(found) == value


def test_a_number_that_is_missing_is_none() -> None:
    assert Goal("perplexity").value(Record(profile=Profile())) is None, "a run that ended with its profile"
    results = results_of({"heldout": 1.0}, training={"final_loss": {"total": None}})
    assert Goal("loss.total").value(Record.from_json(results)) is None


def test_names_and_directions_are_checked_before_the_training() -> None:
    for name in ("perplexity", "heldout.accuracy", "heldout.kl", "loss.soft", "training.seconds", "imdb.gap_closed"):
        check(name)
    check("accuracy", "maximize")
    for name, says in [
        ("heldout.acuracy", "did you mean heldout.accuracy"),
        ("wikitext2.perplexity", "choose one of perplexity, accuracy"),
    ]:
        with pytest.raises(SettingError, match=rf"optimize={name} is not a number of this run.*{says}"):
            check(name)
    with pytest.raises(SettingError, match=r"optimize=heldout\.kl"):
        check("heldout.kl", compares=False)
    with pytest.raises(SettingError, match=r"optimize=gap_closed"):
        check("gap_closed", has_gap=False)
    for name, direction in (("accuracy", "minimize"), ("accuracy", Direction.minimize), ("gap_closed", "minimize")):
        with pytest.raises(SettingError, match=WRONG_WAY):
            check(name, direction)


@pytest.mark.parametrize("optimize, direction", [(3, None), ("", None), (["a"], None), ("perplexity", ["minimize"])])
def test_what_is_no_name_is_refused(optimize: Any, direction: Any) -> None:
    with pytest.raises(SettingError):
        Goal.of(optimize, direction)
    assert Goal.of(None, ["minimize", "maximize"]) is None


def test_a_run_has_a_gap_where_its_teacher_and_a_baseline_are_scored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whole_run, "check_memory", lambda *_: None)
    teacher, evaluator = SimpleNamespace(model=None), SimpleNamespace(measures=MEASURES)

    def run(baseline: str | None, teachers: list[Any]) -> Any:
        evaluate = SimpleNamespace(baseline=baseline)
        pair = {"scored_teachers": teachers, "student": None, "tokenizer": None, "trained_head": True}
        return SimpleNamespace(
            config=SimpleNamespace(optimize="heldout.gap_closed", evaluate=evaluate, train=TrainConfig()),
            pair=SimpleNamespace(**pair, comparable=False),
            data=SimpleNamespace(sets=[SimpleNamespace(name="heldout")]),
            objective=SimpleNamespace(needs_teacher=True, terms={}),
            task=SimpleNamespace(evaluator=lambda *_: evaluator),
            ranks=None,
        )

    assert whole_run.make_evaluator(run("runs/baseline", [teacher])) == (evaluator, None)
    for other in (run(None, [teacher]), run("runs/baseline", [])):
        with pytest.raises(SettingError, match=r"^optimize=heldout\.gap_closed is not a number of this run"):
            whole_run.make_evaluator(other)
