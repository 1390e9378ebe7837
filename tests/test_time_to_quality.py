"""The benchmark of time to quality: what it counts, and that it runs."""

from pathlib import Path

import pytest
from test_benchmarks import script

from benchmarks.quality.time_to_quality import best_tuned, show
from benchmarks.quality.trainings import (
    Course,
    contestants,
    operations_of_row,
    rows_per_step,
    shape_of,
    updates_of,
)
from benchmarks.step.models import SHAPES, operations


def test_rows_until_a_target_lie_between_two_scores() -> None:
    course = Course([100, 200, 400], [80.0, 40.0, 35.0], 30.0, [1.0, 2.0, 4.0], 4.0)
    assert course.rows_to(80) == course.rows_to(90) == 100
    assert course.rows_to(40) == pytest.approx(200)
    assert 100 < (course.rows_to(56.5) or 0) < 151  # half of the way by the logarithm
    assert course.rows_to(34.9) is None


@pytest.mark.parametrize(("kind", "rows"), [("masked", 50), ("causal", 50)])
def test_the_example_has_a_thousand_updates_and_all_have_rows(kind: str, rows: int) -> None:
    example, *tuned, own = contestants(kind, 5000)
    assert updates_of(example) == 1000 and rows_per_step(example) == rows and example.plain
    assert len({each.settings for each in tuned}) == 4 and all(each.plain for each in tuned)
    assert own.name == "distill" and not own.plain and updates_of(own) == 625


def test_operations_are_those_of_the_step_benchmark() -> None:
    shape = SHAPES["bundled"]
    assert shape.rows * operations_of_row(shape, 0.15, True) == pytest.approx(operations(shape, "all"), rel=1e-9)
    assert operations_of_row(shape, 0.3, False) < operations_of_row(shape, 0.3, True)
    bert = {"num_hidden_layers": 4, "hidden_size": 192, "vocab_size": 6144}
    assert shape_of(bert, 2, 16, 128) == shape
    assert shape_of({"n_layer": 6, "n_embd": 192, "vocab_size": 4096}, 3, 5, 128).task == "clm"


def test_the_table_names_the_best_tuned_and_what_was_not_reached() -> None:
    def course(*values: float) -> list[Course]:
        return [Course([100, 200, 300], list(values), 40.0, [1.0, 2.0, 3.0], 3.0)]

    courses = {
        "example": course(90.0, 80.0, 70.0),
        "example, tuned 0": course(60.0, 55.0, 51.0),
        "example, tuned 1": course(60.0, 52.0, 47.0),
        "distill": course(60.0, 45.0, 43.0),
    }
    assert best_tuned(courses) == ["example", "example, tuned 1", "distill"]
    rates = {"plain": [0.02], "distill": [0.01], "command": [{"seconds": 60, "training": 30}], "machine": "here"}
    printed = show("masked", courses, SHAPES["bundled"], rates)
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in printed.splitlines()]
    assert ["the end of example, 70.00", "example", "300", "6"] in [line[:4] for line in lines]
    assert ["the end of example, 70.00", "distill", "100", "1"] in [line[:4] for line in lines]
    assert ["1.1 x the teacher, 44.00", "example", "not reached"] in [line[:3] for line in lines]
    assert "Distill's whole command took 60 s" in printed


@pytest.mark.slow
def test_everything_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISTILL_DATA", "")
    printed, results = script(
        "quality/time_to_quality.py", tmp_path, "--work", str(tmp_path), "--quick", "--turns", "1"
    )
    assert "seconds of training" in printed and set(results["runs"]) == {"example", "distill"}
