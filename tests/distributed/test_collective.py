"""Engines of torch.distributed that come as plug-ins: a job on one, and one line for what does not start."""

import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from distributed import free_port, run_ranks
from job import ROOT, Shelf, assert_same, command, results

from distill.config.errors import parse
from distill.config.settings import BackendConfig
from distill.distributed import join_ranks
from distill.runtime.errors import SettingError

# What a run says of engines that torch does not start.
LACKING = {
    "plug_in:broken": "does not start: broken: there is no such network card; give NAME, or MODULE:NAME",
    "no_such_package.part:smddp": "does not start: No module named 'no_such_package'; give NAME, or MODULE:NAME",
    "smddp": "does not start: Unknown",
}


def refusals(ports: list[int]) -> dict[str, str]:
    """On one rank: what a run on each of these engines says."""
    said = {}
    for engine, port in zip(LACKING, ports, strict=True):
        os.environ["MASTER_PORT"] = str(port)
        with pytest.raises(SettingError) as error:
            join_ranks(BackendConfig(name="ddp", device="cpu", threads=1, timeout=60.0, collective=engine))
        said[engine] = str(error.value)
    return said


def test_an_engine_that_does_not_start_is_refused_in_one_line(tmp_path: Path) -> None:
    for said in run_ranks(2, tmp_path, refusals, [free_port() for _ in LACKING]):
        for engine, why in LACKING.items():
            assert said[engine].startswith(f"backend.collective={engine} {why}"), said[engine]


@pytest.mark.slow
def test_a_job_of_two_ranks_sends_all_through_the_plug_in(
    shelf: Shelf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The student is bitwise that of Gloo, and the plug-in was handed each element of the gradients at each step."""
    ranks = ["backend=ddp", "backend.processes=2", "train.accumulate=1"]
    monkeypatch.setenv("PLUG_IN_LOG", str(tmp_path))
    for folder, more in {"gloo": [], "plug-in": ["backend.collective=plug_in:counting"]}.items():
        arguments = shelf.arguments(tmp_path / folder, *ranks, *more)
        process = command(*arguments, path=ROOT / "tests")
        _, errors = process.communicate(timeout=500)
        assert process.returncode == 0, errors
    assert_same(tmp_path / "gloo", tmp_path / "plug-in")
    block = results(tmp_path / "plug-in")["backend"]
    assert block["collective"] == "plug_in:counting" and "counting" in block["rings"]["engine"]
    assert results(tmp_path / "gloo")["backend"]["collective"] is None
    reports = [(tmp_path / folder / "report.md").read_text() for folder in ("gloo", "plug-in")]
    assert "plug_in:counting" not in reports[0] and "Collective" in reports[1] and "plug_in:counting" in reports[1]
    parameters = results(tmp_path / "plug-in")["student"]["parameters"]
    calls = [Counter((tmp_path / f"{rank}.log").read_text().splitlines()) for rank in range(2)]
    assert calls[0] == calls[1]
    sums = [call.split()[1:] for call in calls[0].elements() if call.startswith("allreduce")]
    large = [int(count) for dtype, count in sums if dtype == "torch.float32" and int(count) >= parameters]
    assert len(large) == results(tmp_path / "plug-in")["training"]["steps"] > 0
    assert {dtype for dtype, _ in sums} >= {"torch.float32", "torch.float64", "torch.int64"}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"collective": "gloo"}, ["backend.collective=gloo", "backend.name=single", "backend=ddp"]),
        ({"name": "horovod", "collective": "gloo"}, ["backend.name=horovod", "leave it null"]),
        ({"name": "ddp", "collective": "gloo", "rings": 4}, ["backend.rings=4", "leave it at 1"]),
    ],
)
def test_settings_that_do_not_go_with_a_plug_in(settings: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(SettingError) as caught:
        parse(BackendConfig, settings, "backend")
    assert all(word in str(caught.value) for word in words), caught.value
