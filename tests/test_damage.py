"""Damage of every file of a run: named, set aside, and made good from what came before; never a traceback."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
from job import Shelf, assert_same, results
from tiny import Fit

from distill.config.settings import BackendConfig, TrainConfig
from distill.distributed.single import Single
from distill.runs.run_folder import RunFolder
from distill.runs.state import State
from distill.runtime.errors import Damaged, SettingError
from distill.runtime.files import MANIFEST, check_digests, read_manifest, write_manifest
from distill.runtime.jsonl import read_lines

CHECKPOINT_FILES = ("model.safetensors", "optimizer.safetensors", "state.json", MANIFEST)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def to_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "cut short": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "emptied": lambda path: path.write_bytes(b""),
    "a flipped bit": flip,
    "removed": lambda path: path.unlink(),
    "a folder": to_folder,
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any, rows: np.ndarray) -> Path:
    """A run folder with the checkpoints of steps 1 to 3; tests copy it."""
    folder = tmp_path_factory.mktemp("run")
    fit_in(folder, tokenizer, rows).run()
    return folder


def fit_in(folder: Path, tokenizer: Any, rows: np.ndarray) -> Fit:
    student = tiny.make_model("distilbert", 1, seed=5).train()
    settings = TrainConfig(batch_size=4, accumulate=2, epochs=1, save_every=1, keep=3)
    return Fit(folder / "checkpoints", tokenizer, rows, None, student, tiny.only(mlm=1.0), settings)


@pytest.fixture
def fit(trained: Path, tmp_path: Path, tokenizer: Any, rows: np.ndarray) -> Fit:
    shutil.copytree(trained, tmp_path / "run")
    return fit_in(tmp_path / "run", tokenizer, rows)


def opened(fit: Fit, resume: str = "auto") -> RunFolder:
    folder = RunFolder(fit.folder.parent, resume, 3, Single(BackendConfig(device="cpu")))
    folder.identify({"run": "tiny"})
    return folder


def begun(folder: RunFolder, fit: Fit) -> State:
    """Where a run resumes in the folder, which is its own from then on."""
    state = folder.load(fit.model, fit.made)
    folder.begin(state, "")
    return state


def newest(fit: Fit) -> Path:
    return fit.folder / "step-00000003"


def assert_taken_back(fit: Fit, lines: list[str]) -> None:
    """The newest checkpoint is named and kept under another name, and the run goes on from the one before."""
    with opened(fit) as folder:
        state = begun(folder, fit)
    assert state.step == 2
    assert any("step-00000003 is damaged" in line and "taking step-00000002" in line for line in lines), lines
    assert (fit.folder / "damaged-step-00000003").exists() and not newest(fit).exists()


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", CHECKPOINT_FILES)
def test_a_damaged_checkpoint_gives_way_to_the_one_before(fit: Fit, lines: list[str], name: str, damage: str) -> None:
    DAMAGES[damage](newest(fit) / name)
    with pytest.raises(SettingError, match=r"resume=strict.*step-00000003 is damaged"), opened(fit, "strict") as folder:
        _ = folder.start
    with pytest.raises(SettingError, match="is damaged"), opened(fit, str(newest(fit))) as folder:
        _ = folder.start
    assert newest(fit).exists()
    assert_taken_back(fit, lines)


@pytest.mark.parametrize("target", ["nowhere", "step-00000003"], ids=["gone", "itself"])
def test_a_link_that_leads_nowhere_in_its_place(fit: Fit, lines: list[str], target: str) -> None:
    """As where a second disk is not there."""
    shutil.rmtree(newest(fit))
    newest(fit).symlink_to(target)
    with opened(fit) as folder:
        assert begun(folder, fit).step == 2
    assert sum("step-00000003 is damaged" in line for line in lines) == 1
    assert (fit.folder / "damaged-step-00000003").is_symlink()


def test_a_file_or_an_empty_folder_in_its_place(fit: Fit, lines: list[str]) -> None:
    shutil.rmtree(newest(fit))
    newest(fit).write_text("x")
    assert_taken_back(fit, lines)
    (fit.folder / "step-00000009").mkdir()
    (fit.folder / "step-x").mkdir()  # of somebody else
    assert opened(fit).start == fit.folder / "step-00000002"


def test_when_all_are_damaged_the_run_starts_anew_and_loses_nothing(fit: Fit, lines: list[str]) -> None:
    for path in fit.folder.iterdir():
        flip(path / "state.json")
    (fit.folder.parent / "metrics.jsonl").write_text('{"step": 1, "seconds": 1.0, "data_wait": 0.0}\n')
    with opened(fit) as folder:
        assert begun(folder, fit).step == 0
    assert sorted(path.name for path in fit.folder.iterdir()) == [f"damaged-step-0000000{n}" for n in (1, 2, 3)]
    assert (fit.folder.parent / "damaged-metrics.jsonl").exists() and "starting from the first step" in lines[-1]


GOOD = '{"step": 1, "seconds": 1.0, "data_wait": 0.0, "loss/total": null}\n'


@pytest.mark.parametrize(
    "bad",
    ["[2]", "{}", "x", '{"step": "2"}', "[" * 100_000, "\x00\x00", '{"step": 1, "seconds": 1.0, "data_wait": 0.0}'],
)
def test_a_damaged_line_of_the_metrics_is_set_aside(fit: Fit, lines: list[str], bad: str) -> None:
    path = fit.folder.parent / "metrics.jsonl"
    path.write_text(f"{GOOD}{bad}\n{GOOD.replace('1', '3')}")
    before = path.read_bytes()
    with opened(fit, "strict") as folder, pytest.raises(SettingError, match=r"resume=strict.*metrics.jsonl.*line 2"):
        begun(folder, fit)
    with opened(fit) as folder:
        begun(folder, fit)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 3]
    assert (path.parent / "damaged-metrics.jsonl").read_bytes() == before
    assert any("metrics.jsonl is damaged (line 2" in line and "2 good lines" in line for line in lines)


def test_a_manifest_lists_what_sha256sum_would(trained: Path, tmp_path: Path) -> None:
    (tmp_path / "a").write_text("abc")
    write_manifest(tmp_path)
    known = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"  # of "abc", in FIPS 180-2
    assert (tmp_path / MANIFEST).read_text() == f"{known}  a\n"
    check_digests(tmp_path, read_manifest(tmp_path))
    (tmp_path / "a").write_text("abd")
    with pytest.raises(Damaged, match="a is not as it was written"):
        check_digests(tmp_path, read_manifest(tmp_path))


@pytest.mark.parametrize("resume", ["auto", "strict"])
def test_a_finished_run_needs_no_checkpoint(
    shelf: Shelf, done: Path, tmp_path: Path, capfd: pytest.CaptureFixture, resume: str
) -> None:
    """Neither a whole one nor one of this release, and it names no damage."""
    folder = Path(shutil.copytree(done, tmp_path / "run"))
    flip(folder / "checkpoints" / "step-00000008" / "optimizer.safetensors")
    state = folder / "checkpoints" / "step-00000008" / "state.json"
    for content in (state.read_text(), json.dumps(json.loads(state.read_text()) | {"format": 5}), "no JSON"):
        state.write_text(content)
        assert shelf.run(folder, f"resume={resume}") == 0
        said = capfd.readouterr().err
        assert "finished and nothing was changed" in said and "damaged" not in said


def test_a_line_of_the_history_that_holds_something_else_is_left_out(fit: Fit, lines: list[str]) -> None:
    folder = opened(fit)
    bad = {"step": 2, "epoch": "a", "loss": {}}
    folder.history_path.write_text('{"step": 1, "epoch": 0.5, "loss": {}}\n' + json.dumps(bad) + "\n")
    begun(folder, fit)
    assert [line["step"] for line in read_lines(folder.history_path)] == [1]
    assert any("history.jsonl" in line and "keeping its 1 good lines" in line for line in lines)


@pytest.mark.slow
def test_a_finished_run_with_damage_ends_with_the_same_student(
    shelf: Shelf, done: Path, tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    """Newest checkpoint, results and history at once; then the student alone, and then all that made it."""
    folder = Path(shutil.copytree(done, tmp_path / "run"))
    flip(folder / "checkpoints" / "step-00000008" / "optimizer.safetensors")
    flip(folder / "results.json")
    (folder / "history.jsonl").write_text("{}\n")
    assert shelf.run(folder) == 0
    said = capfd.readouterr().err
    assert all(name in said for name in ("step-00000008", "results.json", "history.jsonl", "damaged"))
    assert "other settings" not in said and "Traceback" not in said
    assert_same(folder, done)
    assert results(folder)["training"]["steps"] == 8

    flip(folder / "student" / "model.safetensors")
    assert shelf.run(folder) == 0
    assert "making the student again" in capfd.readouterr().err and (folder / "damaged-student").is_dir()
    assert_same(folder, done)

    shutil.rmtree(folder / "student")
    shutil.rmtree(folder / "checkpoints")
    assert shelf.run(folder) == 2
    assert "there is no checkpoint to continue it from" in capfd.readouterr().err
