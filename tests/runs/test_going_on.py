"""Runs that go on: from a finished one, from a named checkpoint, after interruptions; and the snapshots on the way."""

import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from job import Shelf, assert_same, lines_of, metrics, results
from tiny import only
from transformers import AutoModelForMaskedLM

from distill.config.settings import BackendConfig
from distill.distributed.single import Single
from distill.report.comparison.runs import find_runs
from distill.report.publish import Snapshots
from distill.runs.checkpoint import Checkpoints
from distill.runs.results_file import read_run
from distill.runs.run_folder import RunFolder
from distill.runs.state import State
from distill.runtime import files
from distill.runtime.errors import Interrupted, SettingError

EVALUATED = ("schedule=constant", "schedule.warmup=0", "train.epochs=null", "train.save_every=1")
CONSTANT = (*EVALUATED, "evaluate.sets=[]", "train.keep=9")


class Kill(BaseException):
    """Stands for a process that ends between two instructions."""


@pytest.fixture(scope="module")
def two(shelf: Shelf) -> Path:
    """A finished run of two steps."""
    assert shelf.run(shelf.root / "two-steps", *EVALUATED, "train.steps=2") == 0
    return shelf.root / "two-steps"


@pytest.fixture
def finished(two: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(two, tmp_path / "run"))


def killed_at(step: int, monkeypatch: pytest.MonkeyPatch, shelf: Shelf, folder: Path, *more: str) -> None:
    """Run until the log and the snapshot of this step, which come before its checkpoint."""
    after_step = Snapshots.after_step

    def killing(self: Snapshots, result: Any) -> None:
        after_step(self, result)
        if result.step == step:
            raise Kill

    with monkeypatch.context() as patch, pytest.raises(Kill):
        patch.setattr(Snapshots, "after_step", killing)
        shelf.run(folder, *more)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_without_a_checkpoint_a_finished_run_is_not_continued(
    shelf: Shelf, finished: Path, capfd: pytest.CaptureFixture
) -> None:
    shutil.rmtree(finished / "checkpoints")
    before = (finished / "metrics.jsonl").read_bytes()
    assert shelf.run(finished, *EVALUATED, "train.steps=3") == 2
    line = lines_of(capfd)[-1]
    assert "there is no checkpoint to continue it from" in line and f"student.path={finished} hydra.run.dir" in line
    assert (finished / "metrics.jsonl").read_bytes() == before and shelf.run(finished, *EVALUATED, "train.steps=2") == 0


def test_a_run_that_is_being_continued_is_not_a_finished_one(
    shelf: Shelf, finished: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    """Its own command still finds its student, and ends the continuation."""
    assert read_run(finished, "run").finished and find_runs([str(finished)])[0].record is not None
    killed_at(4, monkeypatch, shelf, finished, *EVALUATED, "train.steps=5", "train.snapshots=[1,2,4]")
    assert (
        "train.snapshot_every ask for 2 of a step up to 2, but the run resumes after step 2" in capfd.readouterr().err
    )
    with pytest.raises(SettingError, match=r"^run=.* is being continued beyond step 2, and that has not ended"):
        read_run(finished, "run")
    (run,) = find_runs([str(finished)])
    assert run.record is None and run.status.startswith("not finished: it stopped after step ")
    for steps in (2, 5):
        assert shelf.run(finished, *EVALUATED, f"train.steps={steps}") == 0
        assert read_run(finished, "run").training.steps == steps


def test_from_a_checkpoint_that_is_named_a_run_goes_on_after_a_kill(
    shelf: Shelf, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    more, whole, again = (*CONSTANT, "train.steps=5"), tmp_path / "whole", tmp_path / "again"
    assert shelf.run(whole, *more, f"resume={finished / 'checkpoints' / 'step-00000001'}") == 0
    named = again / "checkpoints" / "step-00000001"
    assert shelf.run(again, *CONSTANT, "train.steps=3") == 0  # checkpoints of another beginning
    (again / "results.json").unlink()
    killed_at(4, monkeypatch, shelf, again, *more, f"resume={named}")
    assert [line["step"] for line in metrics(again)] == [1, 2, 3, 4]
    assert names(again / "checkpoints") == ["step-00000001", "step-00000002", "step-00000003"]
    shutil.rmtree(named)  # as pruning does
    capfd.readouterr()
    assert shelf.run(again, *more, f"resume={named}") == 0
    assert "this run started from that checkpoint before and continues after step 3" in capfd.readouterr().err
    assert_same(again, whole)
    assert [line["seconds"] for line in metrics(again)] == sorted(line["seconds"] for line in metrics(again))


def test_without_a_checkpoint_nothing_of_an_earlier_start_stays(shelf: Shelf, tmp_path: Path) -> None:
    """It may have had other settings: nothing but a checkpoint knows them."""
    folder = tmp_path / "run"
    for step in (1, 3):
        (folder / "snapshots" / f"step-{step}").mkdir(parents=True)
    (folder / ".lock").touch()  # which a run has before its first snapshot
    (folder / "history.jsonl").write_text('{"step": 1, "loss": {}, "perplexity": {"heldout": 123456.0}}\n')
    assert shelf.run(folder, *EVALUATED, "train.steps=1", "train.snapshots=[1]") == 0
    (line,) = results(folder)["history"]
    assert line["perplexity"]["heldout"] < 123456.0
    assert names(folder / "snapshots") == ["step-1"] and (folder / "snapshots/step-1/model.safetensors").exists()


def test_the_steps_before_an_interruption_have_their_line(fit: Any) -> None:
    train = {"epochs": None, "steps": 8, "log_every": 3, "save_every": 100}
    first, second = (fit("", train, objective=only(mlm=1.0)) for _ in range(2))
    first.student.base_model.register_forward_pre_hook(
        lambda *_: signal.raise_signal(signal.SIGTERM) if first.state.step == 3 else None
    )
    with pytest.raises(Interrupted):
        first.run()
    second.resume().run()
    assert [line["step"] for line in first.logs] == [3, 4] and [line["step"] for line in second.logs] == [6, 8]


# --- which checkpoint ----------------------------------------------------------------------------------------------


def saved(run: Path, *steps: int, beginning: Path | None = None) -> list[Path]:
    """Checkpoints of a run, which has begun from another one where that is given."""
    model, named = torch.nn.Linear(2, 2), None if beginning is None else str(beginning.resolve())
    checkpoints = Checkpoints(run / "checkpoints", 9, {}, Single(BackendConfig(device="cpu", threads=1)))
    checkpoints.begin(precision={"student": "fp32"}, began_from=named)
    for step in steps:
        assert checkpoints.save(State(step=step), model, torch.optim.SGD(model.parameters(), lr=0.1))
    return checkpoints.saved()


def run_folder_of(path: Path, resume: Path | str) -> RunFolder:
    return RunFolder(path, str(resume), 9, Single(BackendConfig(device="cpu", threads=1)))


def test_a_checkpoint_of_another_run_discards_no_training(tmp_path: Path) -> None:
    (other,), (first, _) = saved(tmp_path / "other", 1), saved(tmp_path / "own", 2, 3)
    with pytest.raises(SettingError, match=r"^resume=.*step-00000001 would discard .*own, whose step-00000003 did not"):
        _ = run_folder_of(tmp_path / "own", other).start
    assert run_folder_of(tmp_path / "own", first).start == first, "back to one of its own"
    assert run_folder_of(tmp_path / "new", other).start == other
    (begun,) = saved(tmp_path / "begun", 2, beginning=other)
    shutil.rmtree(other)
    assert run_folder_of(tmp_path / "begun", other).start == begun, "it goes on"


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files whose digests are taken from here on."""
    found: list[str] = []
    monkeypatch.setattr(files, "sha256", lambda path, real=files.sha256: found.append(path.name) or real(path))
    return found


def test_a_resume_compares_each_file_of_a_checkpoint_once(tmp_path: Path, read: list[str]) -> None:
    """With 84 GB on eight machines each further pass reads another 672."""
    (newest,) = saved(tmp_path / "run", 2, beginning=tmp_path / "other")
    read.clear()
    folder, model = run_folder_of(tmp_path / "run", tmp_path / "other"), torch.nn.Linear(2, 2)
    assert folder.recorded["formats"] == {"student": "fp32"}
    assert folder.beginning() == str(tmp_path / "other") and folder.start == newest
    assert folder.load(model, torch.optim.SGD(model.parameters(), lr=0.1)).step == 2
    assert sorted(read) == ["model.safetensors", "optimizer.safetensors", "state.json"]


@pytest.mark.parametrize(
    ("rank", "local_rank", "shards", "expected"),
    [
        (2, 0, False, ["model.safetensors", "state.json"]),
        (3, 1, False, ["optimizer.safetensors"]),
        (3, 1, True, []),
    ],
)
def test_each_rank_compares_its_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: list[str], rank: int, local_rank: int, shards: bool,
    expected: list[str],
) -> None:  # fmt: skip
    """Those of one machine all files between them; those that share a student, which see one storage, all together."""
    (newest,) = saved(tmp_path / "run", 2)
    read.clear()
    folder = run_folder_of(tmp_path / "run", "auto")
    places = {"rank": rank, "size": 4, "local_rank": local_rank, "local_size": 2, "shards_student": shards}
    for name, value in (places | {"agree": lambda work: work(), "gather": lambda value: [value]}).items():
        monkeypatch.setattr(folder.ranks, name, value, raising=False)
    folder.checkpoints.check(newest)
    assert read == expected


# --- snapshots -----------------------------------------------------------------------------------------------------

STEPS = ("schedule=constant", "train.epochs=null")
EVERY = (*STEPS, "train.snapshot_every=2", "train.steps=5", "train.save_every=2")


def weights_file(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def kept(shelf: Shelf) -> Path:
    """A run of five steps with snapshots after 1, 2 and 4; one checkpoint is left."""
    more = ("train.snapshots=[1]", "train.snapshot_every=2", "train.keep=1", "evaluate.every_steps=4")
    assert shelf.run(shelf.root / "snapshots", *STEPS, "train.steps=5", *more) == 0
    return shelf.root / "snapshots"


def test_snapshots_stay_beside_the_checkpoints(kept: Path) -> None:
    assert names(kept / "snapshots") == ["step-1", "step-2", "step-4"]
    assert names(kept / "checkpoints") == ["step-00000004", "step-00000005"]
    found = results(kept)
    assert found["snapshots"] == [1, 2, 4] and [line["step"] for line in found["history"]] == [4, 5]
    assert "snapshots/step-N for N = 1, 2, 4" in (kept / "report.md").read_text()
    card = (kept / "snapshots" / "step-2" / "README.md").read_text()
    assert "Training took 2 steps" in card and "AutoModelForMaskedLM" in card


@pytest.mark.parametrize("step", [2, 4])
def test_a_snapshot_is_the_student_of_a_shorter_run(shelf: Shelf, kept: Path, step: int) -> None:
    folder, snapshot = shelf.root / f"short-{step}", kept / "snapshots" / f"step-{step}"
    assert shelf.run(folder, *STEPS, f"train.steps={step}", "evaluate.sets=[]") == 0
    assert weights_file(snapshot) == weights_file(folder / "student") != weights_file(kept / "student")
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (snapshot / name).read_bytes() == (folder / "student" / name).read_bytes(), name


def test_a_snapshot_is_a_student_and_a_teacher(shelf: Shelf, kept: Path) -> None:
    snapshot = kept / "snapshots" / "step-2"
    student = ["student=pretrained", f"student.path={snapshot}", "student.layers=null", f"teacher.path={snapshot}"]
    assert shelf.run(shelf.root / "further", *student, "train.steps=1") == 0
    found = results(shelf.root / "further")
    parameters = AutoModelForMaskedLM.from_pretrained(snapshot).num_parameters()
    assert found["teacher"]["parameters"] == found["student"]["parameters"] == parameters


def test_after_a_kill_snapshots_behind_the_checkpoint_are_made_anew(
    shelf: Shelf, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The code of a loss may have been edited in between."""
    folder = shelf.root / "killed-snapshots"
    killed_at(4, monkeypatch, shelf, folder, *EVERY)
    assert names(folder / "checkpoints") == ["step-00000002"], "the snapshot comes before the checkpoint of its step"
    first = folder / "snapshots" / "step-4"
    (first / "mark").touch()
    (folder / "snapshots" / ".step-6.new").mkdir()  # what a killed process leaves of one that it was writing
    assert shelf.run(folder, *EVERY) == 0
    assert not (first / "mark").exists() and results(folder)["snapshots"] == [2, 4]
    assert weights_file(first) == weights_file(kept / "snapshots" / "step-4")
    # Those of a training that has diverged, as where the loss was high from step 3 on, do not stay either.
    (folder / "results.json").unlink()
    for step in (4, 5):
        (folder / f"checkpoints/step-{step:08d}").rename(folder / f"checkpoints/diverged-step-{step:08d}")
    (first / "mark").touch()
    assert shelf.run(folder, *EVERY) == 0
    assert not (first / "mark").exists() and results(folder)["snapshots"] == [2, 4]


@pytest.mark.parametrize("setting", ["train.snapshots=[2,9]", "train.snapshot_every=9", "train.snapshots=[a]"])
def test_snapshots_beyond_the_end_are_refused(shelf: Shelf, setting: str, capfd: pytest.CaptureFixture) -> None:
    folder = shelf.root / "beyond"
    assert shelf.run(folder, setting) == 2 and not list(folder.glob("*"))
    (line,) = lines_of(capfd)
    assert setting.split("=")[0] in line and ("a]" in setting or "step 8" in line)
