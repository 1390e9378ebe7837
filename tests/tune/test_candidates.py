"""What a tuning may try, what it proposes for a made-up profile, and what its table says."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from made_up_profile import STEPS, rank, run, step

from distill.runs.profile.loader import LoaderTimes
from distill.runs.profile.record import RunProfile
from distill.runs.profile.rules import diagnose
from distill.runtime.errors import SettingError
from distill.tune.__main__ import plan_of
from distill.tune.candidate import Candidate, keeps_student
from distill.tune.candidates import candidates
from distill.tune.table import write
from distill.tune.trial import Outcome
from distill.tune.tuning import Plan, Tried, Tuning

GIVEN: dict[str, Any] = {
    "teacher": {"kind": "embedded", "micro_batches": 1, "cache": {"top_k": None}},
    "backend": {"rings": "1", "threads": None},
    "precision": {"student": "bf16", "teacher": "bf16", "compile": True, "kernels": "auto"},
}
MEMORY = {"seconds": [0.5], "process_cpu": [1.0], "process_memory": [2e9], "memory_free": [3e9]}


def proposed(profile: RunProfile, **given: Any) -> dict[str, list[Candidate]]:
    return candidates(profile, diagnose(profile), GIVEN | given)


@pytest.mark.parametrize(
    "setting", ["train.workers", "train.batch_size", "backend.threads", "precision.compile", "teacher.micro_batches"]
)
def test_settings_that_keep_the_student_may_be_tried(setting: str) -> None:
    assert keeps_student(setting)


@pytest.mark.parametrize(
    "setting",
    [
        "optimizer.lr",
        "train.epochs",
        "teacher.path",
        "corpus.rows",
        "seed",
        "objective.soft.weight",
    ],
)
def test_others_may_not(setting: str) -> None:
    with pytest.raises(SettingError, match=f"^{setting} changes the student"):
        Candidate("no", {setting: 1})


def test_of_the_teachers_formats_int8_may_not() -> None:
    assert keeps_student("precision.teacher", "bf16") and not keeps_student("precision.teacher", "int8")


def test_a_rule_comes_first_with_its_prediction() -> None:
    times = LoaderTimes(STEPS, 0.2 * STEPS, 0.2 * STEPS, 1)
    found = proposed(run(rank(steps=[step(data=0.1)] * STEPS, loader=times, samples=MEMORY)))
    assert found["rules"][0].change == {"train.workers": 2} and found["rules"][0].predicted == pytest.approx(2.0)
    assert found["workers"] == []  # the same change


def test_micro_batches_grow_where_memory_allows_and_keep_their_rows() -> None:
    (doubled,) = proposed(run(rank(samples=MEMORY)))["micro_batch"]
    assert doubled.change == {"train.batch_size": 16, "train.accumulate": 2} and doubled.predicted is None
    assert doubled.then is not None
    following = doubled.then(0.12, 0.08)  # saved 40 ms, the next doubling 20
    assert following is not None and following.change == {"train.batch_size": 32, "train.accumulate": 1}
    assert following.predicted == pytest.approx(2.0)
    assert doubled.then(0.1, 0.1) is None  # it gained nothing
    full = MEMORY | {"memory_free": [1e9]}
    assert proposed(run(rank(samples=full)))["micro_batch"] == []
    whole = run(rank(samples=MEMORY), micro_batches=1, accumulate=1)
    assert proposed(whole)["micro_batch"] == [] and proposed(whole)["teacher"] == []


def test_what_a_run_has_not_is_not_tried() -> None:
    profile = run(rank(samples=MEMORY, cores=2))
    found = proposed(profile)
    assert [each.change for each in found["teacher"]] == [{"teacher.micro_batches": 2}]
    assert [each.change for each in found["threads"]] == [{"backend.threads": 1}]
    assert found["rings"] == found["compile"] == found["precision"] == found["kernels"] == found["workers"] == []
    assert proposed(profile, teacher={"kind": "none"})["teacher"] == []
    two = run(rank(0, samples=MEMORY), rank(1, samples=MEMORY))
    assert [each.change for each in proposed(two)["rings"]] == [{"backend.rings": "auto"}]


def test_the_table_says_prediction_and_measurement(tmp_path: Path) -> None:
    tuning = Tuning(Plan(["+recipe=smoke"], tmp_path))
    tuning.base.outcomes = [Outcome(0.2, conclusion="No bottleneck.")]
    good = Tried(Candidate("threads", {"train.workers": 2}, 1.5, "why"), [Outcome(0.13)], [1.5, 1.6], 1e-7)
    bad = Tried(Candidate("compiled models", {"precision.compile": "true"}), [Outcome(error="no compiler")])
    noise = Tried(Candidate("rings", {"backend.rings": "auto"}), [Outcome(0.19)], [1.3, 0.9])
    tuning.tried = [good, bad, noise]
    text = write(tuning)
    assert "| threads | train.workers=2 | 1.50 | 1.55 (1.50 to 1.60) | 130.0 | 1e-07 |" in text
    assert "failed: no compiler" in text and "1.55 times as fast: train.workers=2" in text
    content = json.loads((tmp_path / "tune.json").read_text())
    assert content["overrides"] == ["train.workers=2"] and content["tried"][0]["predicted"] == 1.5
    assert (tmp_path / "tune.md").read_text().endswith(text)
    tuning.tried = [noise]
    assert "best as it is" in write(tuning)


def test_the_command_line() -> None:
    plan = plan_of(
        ["+recipe=smoke", "train.workers=1", "tune.steps=20", "tune.changes=[rules,threads]", "resume=never"]
    )
    assert plan.arguments == ["+recipe=smoke", "train.workers=1"] and plan.folder == Path("runs/smoke-tune")
    assert plan.steps == 20 and plan.kinds == ("rules", "threads")
    for argument, words in [
        ("tune.steps=3", "tune.steps=3 is no number of at least 10"),
        ("tune.step=30", "tune.steps"),
        ("tune.changes=workres", "did you mean workers"),
    ]:
        with pytest.raises(SettingError, match=words):
            plan_of([argument])


def test_a_finding_survives_its_way_through_json() -> None:
    (finding, *_) = diagnose(run(rank(steps=[step(data=0.5)] * STEPS)))
    assert {**asdict(finding), "named": True} == json.loads(json.dumps(finding.as_dict()))
