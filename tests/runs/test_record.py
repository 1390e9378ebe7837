"""The record of a run: it is read as it was written, and anything else is refused in one line."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sample import sample_results

from distill.config.objective import WeightSchedule
from distill.runs.facts import Baseline, GapClosed
from distill.runs.record import Record
from distill.runs.results_file import read_results, read_run, write_results
from distill.runtime.errors import Damaged, SettingError


@pytest.mark.parametrize("content", [{}, sample_results()])
def test_a_record_is_read_as_it_was_written(content: dict[str, Any], tmp_path: Path) -> None:
    record = Record.from_json(content)
    write_results(tmp_path / "results.json", record)
    assert read_results(tmp_path / "results.json") == record
    assert json.loads((tmp_path / "results.json").read_text())["version"] == 1
    assert Record.from_json(record.to_json()) == record and record.redacted() == record


def test_only_a_run_with_a_baseline_has_a_gap() -> None:
    """Other runs have the record that they had before there was one; no gap is kept as a null."""
    assert "gap_closed" not in json.dumps([Record().to_json(), Record.from_json(sample_results()).to_json()])
    closed = {"perplexity": {"heldout": GapClosed(fraction=0.5, low=0.4, high=0.6, without_gap=0), "imdb": GapClosed()}}
    record = Record(baseline=Baseline(gap_closed=closed))
    assert Record.from_json(record.to_json()) == record
    written = {"heldout": {"fraction": 0.5, "low": 0.4, "high": 0.6, "without_gap": 0}, "imdb": {"fraction": None}}
    assert record.to_json()["baseline"]["gap_closed"] == {"perplexity": written}


def test_a_weight_with_a_schedule_is_read_as_one() -> None:
    weight = {"start": 1.0, "end": 0.0, "shape": "cosine"}
    terms = {"soft": {"title": "Soft targets", "weight": weight}, "mlm": {"weight": 2}}
    record = Record.from_json({"objective": {"kernel": "fused", "terms": terms}})
    assert record.objective.terms["soft"].weight == WeightSchedule(start=1.0, end=0.0, shape="cosine")
    assert record.objective.terms["mlm"].weight == 2


@pytest.mark.parametrize(
    ("content", "line"),
    [
        ({"training": []}, "training=[]: Input should be a valid dictionary"),
        ({"training": {"steps": "many"}}, "training.steps=many: Input should be a valid integer"),
        ({"training": {"steps": True}}, "training.steps=True: Input should be a valid integer"),
        ({"student": {"perplexity": {"a": "low"}}}, "student.perplexity.a=low: Input should be a valid number"),
        ({"history": [{"step": 1}, {"loss": 3}]}, "history.1.loss=3: Input should be a valid dictionary"),
        ({"snapshots": [1, None]}, "snapshots.1=None: Input should be a valid integer"),
        ({"version": 2}, "version=2: Input should be 1"),
    ],
)
def test_a_value_of_another_kind_is_refused_in_one_line(content: dict[str, Any], line: str, tmp_path: Path) -> None:
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    (tmp_path / "results.json").write_text(json.dumps(content | {"sha256": digest}))
    with pytest.raises(Damaged, match=r"results\.json is damaged") as damaged:
        read_results(tmp_path / "results.json")
    assert damaged.value.reason.startswith(line)
    with pytest.raises(SettingError, match=f"^RUN={tmp_path} is no finished run: ") as error:
        read_run(tmp_path, "RUN")
    assert error.value.status == 2 and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "edit", [lambda text: text.replace('"mine"', '"yours"'), lambda text: text.replace('"sha256"', '"digest"')]
)
def test_a_change_behind_its_back_is_damage(edit: Callable[[str], str], tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    write_results(path, Record.from_json(sample_results() | {"recipe": "mine"}))
    path.write_text(edit(path.read_text()))
    with pytest.raises(Damaged, match="its SHA-256 differs"):
        read_results(path)
