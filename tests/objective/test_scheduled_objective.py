"""Weights and temperature of the objective that follow a schedule, as a user writes them: logged, recorded, refused."""

from pathlib import Path

import pytest
from job import Shelf, metrics, results

SCHEDULED = ("objective.soft.weight={start: 5.0, end: 1.0}", "objective.temperature={start: 4, end: 1, shape: cosine}")
CONSTANT = ("schedule=constant", "schedule.warmup=0")


@pytest.fixture(scope="module")
def trained(shelf: Shelf) -> Path:
    assert shelf.run(shelf.root / "scheduled", *SCHEDULED, *CONSTANT, "train.epochs=1") == 0
    return shelf.root / "scheduled"


def test_what_is_in_force_is_logged_and_recorded(trained: Path) -> None:
    lines = metrics(trained)
    assert [line["weight/soft"] for line in lines] == pytest.approx([4.5, 3.5, 2.5, 1.5])
    temperatures = [line["temperature/soft"] for line in lines]
    assert 4 > temperatures[0] > temperatures[1] > 2.5 > temperatures[2] > temperatures[3] > 1
    for line in lines:
        parts = line["weight/soft"] * line["loss/soft"] + 2 * line["loss/mlm"] + line["loss/cosine"]
        assert line["loss/total"] == pytest.approx(parts)
    content = results(trained)
    assert content["objective"]["terms"]["soft"] == {
        "title": "Soft targets",
        "weight": {"start": 5.0, "end": 1.0, "shape": "linear"},
        "temperature": {"start": 4.0, "end": 1.0, "shape": "cosine"},
    }
    assert content["objective"]["terms"]["mlm"]["weight"] == 2.0
    low, high = min(line["loss/total"] for line in lines), max(line["loss/total"] for line in lines)
    assert low < content["history"][0]["loss"]["total"] < high


def test_it_cannot_be_continued(trained: Path, shelf: Shelf, capfd: pytest.CaptureFixture) -> None:
    capfd.readouterr()
    assert shelf.run(trained, *SCHEDULED, *CONSTANT, "train.epochs=2") == 2
    (line,) = [line for line in capfd.readouterr().err.splitlines() if line.startswith("distill: ")]
    assert "train.epochs was 1 and is now 2" in line and "follows a schedule that is made for one length" in line


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["objective.mlm.weight={start: 1.0}"], ["objective.mlm.weight.end: missing"]),
        (["objective.mlm.weight={start: 1.0, end: -1.0}"], ["objective.mlm.weight.end=-1.0", "from 0 up to 1,000,000"]),
        (["objective.temperature={start: 4.0, end: 0.0}"], ["objective.temperature.end=0.0", "from 0.01 up to 1,000"]),
        (["objective.temperature={start: 4.0, end: 1.0, shape: wave}"], ["objective.temperature", "wave"]),
        (
            [*SCHEDULED, "teacher.cache.top_k=8", "objective.masking.static=true", "objective.cosine.weight=0"],
            ["teacher.cache.top_k=8: kept at one temperature", "objective.soft.temperature goes from 4.0 to 1.0"],
        ),
    ],
)
def test_what_cannot_be_is_refused(
    settings: list[str], words: list[str], shelf: Shelf, tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    assert shelf.run(tmp_path / "run", *settings) == 2
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("distill: ")]
    assert len(lines) == 1 and all(word in lines[0] for word in words), lines
    print(lines[0])
