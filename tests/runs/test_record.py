"""The record of a run and the numbers of a step: read as they were written, and where relative paths of it lead."""

import hashlib
import json
import math
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from sample import sample_results

from distill.config.objective import WeightSchedule
from distill.evaluation.users import TAKEN
from distill.runs.facts import Baseline, GapClosed, Scored
from distill.runs.located import settings_of_run
from distill.runs.record import Record
from distill.runs.results_file import read_results, read_run, write_results
from distill.runs.step import StepResult, StepStats
from distill.runtime.errors import Damaged, SettingError
from distill.runtime.signals import ALL


@pytest.mark.parametrize("content", [{}, sample_results()])
def test_a_record_is_read_as_it_was_written(content: dict[str, Any], tmp_path: Path) -> None:
    record, path = Record.from_json(content), tmp_path / "results.json"
    write_results(path, record)
    assert read_results(path) == record == Record.from_json(record.to_json()) == record.redacted()
    assert json.loads(path.read_text())["version"] == 1 and "gap_closed" not in path.read_text()


def test_a_record_from_before_conclusions_is_read() -> None:
    """What it has in their place is no measure."""
    drawn = {"perplexity": {"heldout": {"ratio": 0.9, "low": 0.8, "high": 0.95, "units": "documents"}}}
    for bootstrap in ({}, drawn):
        old = {"baseline": {"steps": 5, "perplexity": {"heldout": 3.0}, "bootstrap": bootstrap, "curve": None}}
        record = Record.from_json(old | {"backend": {"rings": {"asked": "1"}}})
        assert record.baseline == Baseline.model_validate({"steps": 5, "perplexity": {"heldout": 3.0}})


def test_no_measure_has_the_name_of_what_stands_beside_it() -> None:
    kinds = [Scored]
    for kind in kinds:
        kinds += kind.__subclasses__()
    assert len(kinds) > 4 and {name for kind in kinds for name in kind.model_fields} <= TAKEN


def test_values_of_several_kinds_are_read_as_what_they_are() -> None:
    closed = {"perplexity": {"heldout": GapClosed(fraction=0.5, low=0.4, high=0.6, without_gap=0), "imdb": GapClosed()}}
    record = Record(baseline=Baseline(gap_closed=closed))
    assert Record.from_json(record.to_json()) == record
    written = {"heldout": {"fraction": 0.5, "low": 0.4, "high": 0.6, "without_gap": 0}, "imdb": {"fraction": None}}
    assert record.to_json()["baseline"]["gap_closed"] == {"perplexity": written}
    terms = {"soft": {"weight": {"start": 1.0, "end": 0.0, "shape": "cosine"}}, "mlm": {"weight": 2}}
    read = Record.from_json({"objective": {"terms": terms}}).objective.terms
    assert read["soft"].weight == WeightSchedule(start=1.0, end=0.0, shape="cosine") and read["mlm"].weight == 2


@pytest.mark.parametrize(
    ("content", "name"),
    [
        ({"training": []}, "training=[]"),
        ({"training": {"steps": "many"}}, "training.steps=many"),
        ({"training": {"steps": True}}, "training.steps=True"),
        ({"student": {"perplexity": {"a": "low"}}}, "student.perplexity.a=low"),
        ({"history": [{"step": 1}, {"loss": 3}]}, "history.1.loss=3"),
        ({"snapshots": [1, None]}, "snapshots.1=None"),
        ({"version": 2}, "version=2"),
    ],
)
def test_a_value_of_another_kind_is_damage(content: dict[str, Any], name: str, tmp_path: Path) -> None:
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    (tmp_path / "results.json").write_text(json.dumps(content | {"sha256": digest}))
    with pytest.raises(Damaged) as damaged:
        read_results(tmp_path / "results.json")
    assert damaged.value.reason.startswith(f"{name}: ")
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


@pytest.mark.parametrize("recorded", [True, False])
def test_a_text_of_the_same_name_in_a_parent_folder_is_another_one(tmp_path: Path, recorded: bool) -> None:
    run, settings = tmp_path / "work" / "runs" / "mine", {"corpus": {"source": {"path": "books"}}}
    for folder in (run, tmp_path / "books", tmp_path / "work" / "runs" / "cache"):
        folder.mkdir(parents=True)
    (run / "config.yaml").write_text(json.dumps(settings | {"data": {"cache": "cache"}}))
    if recorded:
        write_results(run / "results.json", Record(started_in=str(tmp_path / "work")))
    expected = str(tmp_path / "work" / "books") if recorded else "books"  # which is not there: the command refuses it
    assert settings_of_run(run)["corpus"]["source"]["path"] == expected
    assert settings_of_run(run)["data"]["cache"] == "cache", "it is made anew"
    os.makedirs(tmp_path / "work" / "cache")
    assert settings_of_run(run)["data"]["cache"] == (str(tmp_path / "work" / "cache") if recorded else "cache")


# --- a step --------------------------------------------------------------------------------------------------------

RESULT = StepResult(
    step=3, epoch=1.5, tokens=60, sums={"soft": 3.0, "mlm": 4.0}, counts={"soft": 2.0, "mlm": 1.0, "tokens": 20.0},
    weights={"soft": 5.0, "mlm": 2.0}, batches=[], rank_sums=torch.tensor([[1.0, 4.0], [2.0, 0.0]]), lr=1e-3,
    grad_norm=1.5, loss_scale=None, seconds=0.5, data_wait=0.1, over=False, stop=None, save_requested=False,
    writing=False,
)  # fmt: skip


@pytest.mark.parametrize("num_terms", [1, 3])
def test_the_sum_of_what_the_ranks_pack_has_the_sums_of_all_by_name(num_terms: int) -> None:
    counts = torch.arange(num_terms + 1, dtype=torch.float64) * 1000 + 16_000_001.0 / 2
    requests, sums = [float(number) for number in range(len(ALL))], [torch.full((num_terms,), 0.25 * n) for n in (0, 1)]
    more = ((True, 12.5), (False, 0.0))  # rank 0 writes, and has the clock
    ranks = [StepStats.pack(own, counts, requests, *last) for own, last in zip(sums, more, strict=True)]
    assert ranks[0].dtype == torch.float32 and ranks[0].shape == (2 * num_terms + 1 + len(ALL) + 2,)
    stats = StepStats.unpack((ranks[0] + ranks[1]).tolist(), num_terms)
    assert stats.sums == [0.25] * num_terms and stats.next_counts == (2 * counts.float()).tolist()
    assert stats.requests == [2 * number for number in requests] and (stats.num_writing, stats.clock) == (1, 12.5)


def test_losses_are_means_over_positions_and_a_step_is_finite_where_they_and_the_gradient_are() -> None:
    assert RESULT.losses == {"total": 5 * 1.5 + 2 * 4.0, "soft": 1.5, "mlm": 4.0}
    without = replace(RESULT, sums={"soft": 3.0, "mlm": 0.0}, counts={"soft": 2.0, "mlm": 0.0, "tokens": 20.0}).losses
    assert without["total"] == 7.5 and math.isnan(without["mlm"])
    assert not RESULT.skipped and RESULT.loss_is_finite
    for value in (math.nan, math.inf, -math.inf):
        overflowed, broken = replace(RESULT, grad_norm=value), replace(RESULT, sums={"soft": 3.0, "mlm": value})
        assert overflowed.loss_is_finite and overflowed.skipped
        assert not broken.loss_is_finite and broken.skipped
