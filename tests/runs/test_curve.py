"""Scores on a few rows while the student trains: where and what they are, and that no kill repeats one."""

import json
from pathlib import Path

import pytest
from job import Shelf

CURVE = ["evaluate.curve.points=2", "evaluate.curve.sequences=2", "train.epochs=null", "train.steps=4"]


def curve_of(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "curve.jsonl").read_text().splitlines()]


def test_a_run_tells_how_good_it_is_by_the_minute(shelf: Shelf, capfd: pytest.CaptureFixture[str]) -> None:
    folder = shelf.root / "curve"
    assert shelf.run(folder, *CURVE, "evaluate.max_sequences=2") == 0
    said = [line for line in capfd.readouterr().err.splitlines() if line.startswith(("before training: ", "after "))]
    results = json.loads((folder / "results.json").read_text())
    lines, curve = curve_of(folder), results["curve"]
    assert [line["step"] for line in lines] == [0, 2, 4] and curve["student"] == lines
    data = next(iter(results["student"]["perplexity"]))
    assert len(said) == 3 and said[0].endswith(f"), on 2 sequences of {data}") and "(teacher " in said[0]
    # With as many rows as the evaluation has, the last point and the teacher's line are those of the evaluation.
    assert (curve["measure"], curve["set"], curve["sequences"]) == ("perplexity", data, 2)
    assert lines[-1]["score"] == pytest.approx(results["student"]["perplexity"][data], rel=1e-6)
    assert curve["teacher"] == pytest.approx(results["teacher"]["perplexity"][data], rel=1e-6)
    assert lines[0]["score"] != lines[-1]["score"] and lines[0]["seconds"] == 0
    assert results["training"]["evaluation_seconds"] > 0


@pytest.mark.slow
def test_one_that_was_stopped_goes_on_with_the_same_points(shelf: Shelf) -> None:
    whole, stopped = shelf.root / "curve", shelf.root / "curve-stopped"
    if not (whole / "curve.jsonl").exists():
        assert shelf.run(whole, *CURVE, "evaluate.max_sequences=2") == 0
    shorter = [*CURVE[:-1], "train.steps=4", "evaluate.max_sequences=2", "train.save_every=1"]
    assert shelf.run(stopped, *shorter) == 0
    # As a run that was killed after the line of step 4 and before its checkpoint.
    for path in (stopped / "results.json", *(stopped / "checkpoints").glob("step-*4")):
        if path.is_dir():
            for file in path.iterdir():
                file.unlink()
            path.rmdir()
        else:
            path.unlink()
    assert [path.name for path in (stopped / "checkpoints").iterdir()] == ["step-00000003"]
    assert shelf.run(stopped, *shorter) == 0
    assert [(each["step"], each["score"]) for each in curve_of(stopped)] == [
        (each["step"], each["score"]) for each in curve_of(whole)
    ]


def test_none_is_asked_for_and_none_is_there(shelf: Shelf, tmp_path: Path) -> None:
    assert (
        shelf.run(tmp_path, "evaluate.curve.points=0", "train.epochs=null", "train.steps=1", "evaluate.max_sequences=1")
        == 0
    )
    assert curve_of(tmp_path) == [] and json.loads((tmp_path / "results.json").read_text())["curve"] is None
