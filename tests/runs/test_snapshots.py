"""Snapshots: the student of chosen steps as model folders, bitwise that of a shorter run, written once."""

import shutil
from pathlib import Path

import pytest
import torch
from job import Shelf, command, distill, results
from transformers import AutoModelForMaskedLM, AutoTokenizer

from distill.config.settings import TrainConfig
from distill.runs.callbacks import Snapshots, check_snapshots
from distill.runs.step import StepResult
from distill.runtime.errors import SettingError

CONSTANT = ("schedule=constant", "train.epochs=null")


class Kill(BaseException):
    """Stands for a process that ends between two instructions."""


def weights_file(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def kept(shelf: Shelf) -> Path:
    """A run of five steps with snapshots after 1, 2 and 4; one checkpoint is left."""
    folder, more = shelf.root / "snapshots", ("train.snapshots=[1]", "train.snapshot_every=2")
    assert shelf.run(folder, *CONSTANT, "train.steps=5", "train.keep=1", "evaluate.every_steps=4", *more) == 0
    return folder


def test_snapshots_stay_beside_the_checkpoints(kept: Path) -> None:
    assert sorted(path.name for path in (kept / "snapshots").iterdir()) == ["step-1", "step-2", "step-4"]
    assert sorted(path.name for path in (kept / "checkpoints").iterdir()) == ["step-00000004", "step-00000005"]
    content = results(kept)
    assert content["snapshots"] == [1, 2, 4] and [line["step"] for line in content["history"]] == [4, 5]
    assert "snapshots/step-N for N = 1, 2, 4" in (kept / "report.md").read_text()
    card = (kept / "snapshots" / "step-2" / "README.md").read_text()
    assert "the student after step 2" in card and "Training took 2 steps" in card and "AutoModelForMaskedLM" in card
    assert (kept / "student" / "README.md").read_text().count("after step") == 0


@pytest.mark.parametrize("step", [2, 4])
def test_a_snapshot_is_the_student_of_a_shorter_run(shelf: Shelf, kept: Path, step: int) -> None:
    folder = shelf.root / f"short-{step}"
    assert shelf.run(folder, *CONSTANT, f"train.steps={step}", "evaluate.sets=[]") == 0
    snapshot = kept / "snapshots" / f"step-{step}"
    assert weights_file(snapshot) == weights_file(folder / "student") != weights_file(kept / "student")
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (snapshot / name).read_bytes() == (folder / "student" / name).read_bytes(), name


def test_a_snapshot_loads_as_a_model_a_student_and_a_teacher(shelf: Shelf, kept: Path) -> None:
    snapshot = kept / "snapshots" / "step-2"
    model, tokenizer = (kind.from_pretrained(snapshot) for kind in (AutoModelForMaskedLM, AutoTokenizer))
    inputs = tokenizer("The quiet river found the [MASK] by the sea.", return_tensors="pt")
    assert model(**inputs).logits.shape[-1] == len(tokenizer)
    further = shelf.root / "further"
    student = ["student=pretrained", f"student.path={snapshot}", "student.layers=null"]
    more = [*student, f"teacher.path={snapshot}", "train.steps=1"]
    assert shelf.run(further, *more) == 0
    content = results(further)
    assert content["teacher"]["parameters"] == content["student"]["parameters"] == model.num_parameters()


def test_after_a_kill_those_behind_the_checkpoint_are_made_anew(
    shelf: Shelf, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The code of a loss may have been edited in between."""
    folder, more = shelf.root / "killed-snapshots", ("train.snapshot_every=2", "train.steps=5", "train.save_every=2")
    save, calls = Snapshots.after_step, []

    def killing(self: Snapshots, step: StepResult) -> None:
        save(self, step)
        calls.append(step.step)
        if step.step == 4:
            raise Kill

    with monkeypatch.context() as patch, pytest.raises(Kill):
        patch.setattr(Snapshots, "after_step", killing)
        shelf.run(folder, *CONSTANT, *more)
    assert calls == [1, 2, 3, 4], "the snapshot comes before the checkpoint of its step"
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step-00000002"]
    first = folder / "snapshots" / "step-4"
    (first / "mark").touch()
    (folder / "snapshots" / ".step-6.new").mkdir()  # what a killed process leaves of one that it was writing
    assert shelf.run(folder, *CONSTANT, *more) == 0
    assert not (first / "mark").exists() and results(folder)["snapshots"] == [2, 4]
    assert weights_file(first) == weights_file(kept / "snapshots" / "step-4")


@pytest.mark.slow
def test_from_a_chosen_checkpoint_later_ones_are_made_anew(shelf: Shelf) -> None:
    folder, more = shelf.root / "chosen-snapshots", ("train.snapshot_every=2", "train.steps=5", "train.save_every=2")
    assert shelf.run(folder, *CONSTANT, *more) == 0
    (folder / "results.json").unlink()
    inodes = {step: (folder / "snapshots" / f"step-{step}").stat().st_ino for step in (2, 4)}
    assert shelf.run(folder, *CONSTANT, *more, f"resume={folder / 'checkpoints' / 'step-00000004'}") == 0
    assert {step: (folder / "snapshots" / f"step-{step}").stat().st_ino for step in (2, 4)} == inodes
    (folder / "results.json").unlink()
    kept = folder.parent / "kept-checkpoint"
    shutil.copytree(folder / "checkpoints" / "step-00000004", kept)
    shutil.rmtree(folder / "checkpoints")  # with them that checkpoint would be one of another run
    late = folder / "snapshots" / "step-5"
    shutil.copytree(folder / "snapshots" / "step-4", late)
    assert shelf.run(folder, *CONSTANT, *more, f"resume={kept}") == 0
    assert not late.exists(), "it was of a run that went on otherwise"


def test_those_of_a_diverged_training_do_not_stay(shelf: Shelf) -> None:
    folder, more = shelf.root / "diverged-snapshots", ("train.snapshot_every=2", "train.steps=5", "train.save_every=2")
    assert shelf.run(folder, *CONSTANT, *more) == 0
    (folder / "results.json").unlink()
    for step in (4, 5):  # as where the loss was high from step 3 on
        (folder / f"checkpoints/step-{step:08d}").rename(folder / f"checkpoints/diverged-step-{step:08d}")
    (folder / "snapshots" / "step-4" / "mark").touch()
    assert shelf.run(folder, *CONSTANT, *more) == 0
    assert not (folder / "snapshots" / "step-4" / "mark").exists() and results(folder)["snapshots"] == [2, 4]


def test_of_a_beginning_without_a_checkpoint_nothing_stays(shelf: Shelf) -> None:
    """It may have had other settings: nothing but a checkpoint knows them."""
    folder = shelf.root / "begun"
    for step in (1, 3):
        (folder / "snapshots" / f"step-{step}").mkdir(parents=True)
    (folder / ".lock").touch()  # which a run has before its first snapshot
    assert shelf.run(folder, *CONSTANT, "train.steps=2", "train.snapshots=[1]") == 0
    assert results(folder)["snapshots"] == [1] and weights_file(folder / "snapshots" / "step-1")


@pytest.mark.slow
def test_one_of_two_ranks_writes(shelf: Shelf, kept: Path) -> None:
    folder, ranks = shelf.root / "two-snapshots", ("backend=ddp", "backend.processes=2", "train.accumulate=1")
    process = command(*shelf.arguments(folder, *CONSTANT, "train.steps=3", "train.snapshots=[2]", *ranks))
    _, errors = process.communicate(timeout=500)
    assert process.returncode == 0, errors
    one, two = (AutoModelForMaskedLM.from_pretrained(each / "snapshots" / "step-2") for each in (kept, folder))
    for (name, weight), other in zip(one.named_parameters(), two.parameters(), strict=True):
        torch.testing.assert_close(weight, other, rtol=0, atol=2e-4, msg=name)


@pytest.mark.parametrize("setting", ["train.snapshots=[2,9]", "train.snapshot_every=9"])
def test_snapshots_beyond_the_end_are_refused(shelf: Shelf, setting: str, capfd: pytest.CaptureFixture) -> None:
    folder = shelf.root / "beyond"
    assert shelf.run(folder, setting) == 2 and not list(folder.glob("*"))
    (line,) = (line for line in capfd.readouterr().err.splitlines() if line.startswith("distill: "))
    assert setting.split("=")[0] in line and "9" in line and "step 8" in line
    with pytest.raises(SettingError, match="step 9, but the run ends after step 8"):
        check_snapshots(TrainConfig(snapshots=[3, 9]), 8)
    check_snapshots(TrainConfig(snapshots=[8], snapshot_every=8), 8)


def test_a_step_that_is_no_number_is_refused(shelf: Shelf, capfd: pytest.CaptureFixture) -> None:
    assert distill(*shelf.arguments(shelf.root / "beyond", "train.snapshots=[a]")) == 2
    assert "train.snapshots" in capfd.readouterr().err
