"""The whole command on a small run: trials in processes of their own, a table, and overrides that work."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from job import Shelf, environment

from distill.tune.__main__ import main

TRIALS = ["tune.steps=12", "tune.turns=1", "tune.changes=[rules,micro_batch,teacher]"]


def tune(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "distill.tune", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=500)


@pytest.mark.slow
def test_a_run_is_tuned(shelf: Shelf, tmp_path: Path) -> None:
    given = shelf.arguments(tmp_path / "tuned", "train.batch_size=2", "train.accumulate=8", "train.epochs=4")
    done = tune(*given, *TRIALS)
    assert done.returncode == 0, done.stderr
    content = json.loads((tmp_path / "tuned" / "tune.json").read_text())
    tried = {each["name"]: each for each in content["tried"]}
    doubled = tried["2 times the rows in a micro-batch"]
    assert doubled["overrides"] == ["train.batch_size=4", "train.accumulate=4"] and not doubled["error"]
    # Micro-batches of two rows cost mostly what they cost besides their rows.
    assert doubled["measured"] > 1.1 and doubled["loss_difference"] < 1e-4
    assert tried["4 times the rows in a micro-batch"]["predicted"] > doubled["measured"]
    assert content["overrides"] and all(each in done.stdout for each in content["overrides"])
    assert not (tmp_path / "tuned" / "trials" / "1" / "student").exists()


def test_a_run_that_cannot_be_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(
        sys, "argv", ["tune", "+recipe=smoke", "train.batch_size=0", f"hydra.run.dir={tmp_path}", "tune.steps=10"]
    )
    assert main() == 2
    said = capfd.readouterr().err
    assert said.strip().splitlines()[-1].startswith("distill: the run cannot be tried: train.batch_size=0")
    assert "Traceback" not in said and os.listdir(tmp_path / "trials")


@pytest.mark.parametrize("given", ["hydra.mode=MULTIRUN", "--multirun", "seed=0,1"])
def test_sweeps_are_refused(
    given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(sys, "argv", ["tune", "+recipe=smoke", given, f"hydra.run.dir={tmp_path}"])
    assert main() == 2
    assert capfd.readouterr().err.startswith("distill: this command is about one run")
    assert not os.listdir(tmp_path)
