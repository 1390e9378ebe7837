"""The attacks of benchmarks/attacks: their cases follow from the seed, each problem is seen, a few run."""

import random
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from forked import Forked
from job import ROOT, environment

case: Any = import_module("benchmarks.attacks.case")
Ended, Kind = case.Ended, case.Kind
SUBJECTS = ("tables", "prepare", "shards", "disks")
REFUSED = "some line\ndistill: corpus.path=x: it is not there; correct it\n"


@pytest.mark.parametrize("subject", SUBJECTS)
def test_cases_follow_from_the_seed_and_have_names_of_their_own(subject: str) -> None:
    names = [
        [each.name for each in import_module(f"benchmarks.attacks.{subject}").cases(random.Random(3))] for _ in range(2)
    ]
    assert names[0] == names[1] and len({*names[0]}) == len(names[0]) >= 20


def test_a_refusal_is_one_line_that_names_the_place(tmp_path: Path) -> None:
    def kind(status: int | None, errors: str, orphans: int = 0, folder: Path | None = None) -> Any:
        return case.refused(Ended(status, "", errors, orphans), r"corpus\.path", folder).kind

    assert kind(2, REFUSED) is Kind.REFUSED
    assert kind(2, REFUSED, folder=tmp_path) is Kind.LEFTOVERS
    assert kind(2, REFUSED, orphans=1) is Kind.ORPHANS
    assert kind(0, "") is Kind.SILENT
    assert kind(None, "") is Kind.HANG
    assert kind(2, f"Traceback (most recent call last):\n{REFUSED}") is Kind.TRACEBACK
    for status, errors in ((1, REFUSED), (2, "x\n"), (2, REFUSED * 2), (2, f"{REFUSED}x\n"), (2, "distill: no\n")):
        assert kind(status, errors) is Kind.WRONG_STATUS, errors


def test_what_has_ended_finishes_with_the_same_result() -> None:
    done, ended = Ended(0, "", "", 0), Ended(74, "", "distill: full\n", 0)
    assert case.finished(done, lambda: True).kind is Kind.FINISHED
    assert case.finished(done, lambda: False).kind is Kind.SILENT
    assert case.resumed(ended, lambda: done, (74,), lambda: True).kind is Kind.RESUMED
    assert case.resumed(done, lambda: done, (74,), lambda: True).kind is Kind.FINISHED
    assert case.resumed(ended, lambda: done, (74,), lambda: False).kind is Kind.SILENT
    assert case.resumed(ended, lambda: ended, (74,), lambda: True).kind is Kind.WRONG_STATUS
    assert case.resumed(ended, lambda: done, (2,), lambda: True).kind is Kind.WRONG_STATUS
    assert case.resumed(Ended(-9, "", "", 0), lambda: done, (-9,), lambda: True).kind is Kind.RESUMED


@pytest.mark.slow
def test_some_attacks() -> None:
    subjects = ["tables", "prepare", "shards"]
    attacks = Forked([*subjects, "--cases", "2"], environment(), script=ROOT / "benchmarks" / "attacks" / "__main__.py")
    output, errors = attacks.communicate(timeout=500)
    assert attacks.returncode == 0 and "problems: 0" in output, output + errors[-3000:]
