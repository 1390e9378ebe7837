"""Files: locks of one process at a time, logs that outlive kills, and files that nobody may change during a run."""

import fcntl
import json
import math
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from job import Shelf, assert_same, save_model

from distill.models.kind import CAUSAL
from distill.models.load import load_pretrained
from distill.runs.callbacks import RunLog
from distill.runtime.errors import SettingError
from distill.runtime.files import atomic, locked
from distill.runtime.jsonl import JsonLines, read_lines


def test_one_at_a_time_and_no_file_is_left(tmp_path: Path) -> None:
    """Another open file is another holder, in one process too."""
    inside = list[int]()  # how many were, whenever one was

    def work(_: int) -> None:
        nonlocal now
        with locked(tmp_path / "lock") as held:
            now += held
            inside.append(now)
            now -= 1

    now = 0
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(1600)))
    assert inside == [1] * 1600 and not list(tmp_path.iterdir())


def test_a_lock_without_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with locked(tmp_path / "lock"), locked(tmp_path / "lock", wait=False) as held:
        assert not held and (tmp_path / "lock").exists()
    (tmp_path / "lock").touch()  # of a process that was killed
    with locked(tmp_path / "lock", wait=False) as held:
        assert held

    def refuse(*arguments: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with locked(tmp_path / "lock", wait=False) as held:  # as NFS answers where another host has it
        assert not held
    with pytest.raises(SettingError, match="cannot be locked"), locked(tmp_path / "lock"):
        pass


def test_a_folder_in_the_place_of_a_file_keeps_its_content(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").mkdir()
    (tmp_path / "config.yaml" / "mine").write_text("mine")
    for content in ("first", "second"):
        with atomic(tmp_path / "config.yaml") as new:
            new.write_text(content)
    assert (tmp_path / "config.yaml").read_text() == "second"
    assert (tmp_path / "damaged-config.yaml" / "mine").read_text() == "mine" and len(list(tmp_path.iterdir())) == 2


# --- logs ----------------------------------------------------------------------------------------------------------


def test_lines_come_back_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "run" / "metrics.jsonl"
    file = JsonLines(path)
    for line in ({"step": 1, "loss/total": 2.5, "epoch": 0.1}, {"step": 2, "loss/total": 1.25, "note": "ü\nx"}):
        file.append(line)
        assert read_lines(path)[-1] == line  # flushed, before any close
    file.append({"step": 3, "a": math.nan, "b": [-math.inf], "c": 0.5})
    assert json.loads(path.read_text().splitlines()[-1]) == {"step": 3, "a": None, "b": [None], "c": 0.5}
    assert read_lines(tmp_path / "absent.jsonl") == []


@pytest.mark.parametrize("tail", ['{"step": 3, "lo', '{"step": 3}', "\x00\x00"])
def test_torn_last_line_is_passed_over_and_then_mended(tail: str, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n' + tail)
    assert [line["step"] for line in read_lines(path)] == [1, 2]
    JsonLines(path).append({"step": 3})
    assert [line["step"] for line in read_lines(path)] == [1, 2, 3]


@pytest.mark.parametrize("line", ["{", "[]", "{}", '{"step": "2"}', '{"step": 1}', "[" * 100_000])
def test_a_broken_line_in_the_middle_is_named(line: str, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"step": 1}}\n{line}\n{{"step": 3}}\n')
    with pytest.raises(SettingError, match=r"line 2 is not a JSON object"):
        read_lines(path)
    assert [line["step"] for line in read_lines(path, only_good=True)] == [1, 3]


# --- files in use --------------------------------------------------------------------------------------------------


def zeros(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(bytes(path.stat().st_size))


@pytest.mark.parametrize("damage", [zeros, lambda path: os.truncate(path, path.stat().st_size // 2)])
def test_weights_are_those_that_were_loaded(damage: Any, tmp_path: Path) -> None:
    model = load_pretrained("teacher.path", str(save_model(tmp_path / "gpt2")), CAUSAL)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    damage(tmp_path / "gpt2" / "model.safetensors")
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())


@pytest.mark.parametrize(
    "name", ["tokens/*/train-00000.bin", pytest.param("teacher/*/part-00000.bin", marks=pytest.mark.slow)]
)
def test_damage_during_a_run_ends_it_in_one_line_and_it_resumes_to_the_same_student(
    name: str, shelf: Shelf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cache = ["teacher.cache.top_k=4", "objective.masking.static=true", f"data.cache={tmp_path / 'cache'}"]
    cache += ["objective.cosine.weight=0", "corpus.max_sequences=null", "train.epochs=null", "train.steps=20"]
    assert shelf.run(tmp_path / "undisturbed", *cache) == 0
    (path,), after_step = (tmp_path / "cache").glob(name), RunLog.after_step

    def zeroed(self: RunLog, step: Any) -> None:
        after_step(self, step)
        if step.step == 3:
            zeros(path)

    with monkeypatch.context() as patch:
        patch.setattr(RunLog, "after_step", zeroed)
        capsys.readouterr()
        assert shelf.run(tmp_path / "run", *cache) == 74
    assert f"distill: {path} is damaged (its SHA-256 differs)" in capsys.readouterr().err.splitlines()[-1]
    if name.startswith("tokens"):  # as that line says; a part of a teacher's cache is made again by itself
        shutil.rmtree(path.parent)
    assert shelf.run(tmp_path / "run", *cache) == 0
    assert_same(tmp_path / "run", tmp_path / "undisturbed")
