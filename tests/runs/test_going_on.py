"""Runs that go on: from a finished one, from a checkpoint that is named, and after an interruption of either."""

import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from job import Shelf, assert_same, metrics, results
from tiny import Fit, make_model, only

from distill.config.settings import BackendConfig, TrainConfig
from distill.distributed.single import Single
from distill.report.comparison.runs import find_runs
from distill.runs.callbacks import Snapshots
from distill.runs.checkpoint import Checkpoints, read_record
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
    folder = shelf.root / "two-steps"
    assert shelf.run(folder, *EVALUATED, "train.steps=2") == 0
    return folder


@pytest.fixture
def finished(two: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(two, tmp_path / "run"))


def killed_at(step: int, monkeypatch: pytest.MonkeyPatch, shelf: Shelf, folder: Path, *more: str) -> None:
    """Run until the log of this step, which comes before its checkpoint."""
    after_step = Snapshots.after_step

    def killing(self: Snapshots, result: Any) -> None:
        after_step(self, result)
        if result.step == step:
            raise Kill

    with monkeypatch.context() as patch, pytest.raises(Kill):
        patch.setattr(Snapshots, "after_step", killing)
        shelf.run(folder, *more)


def steps(folder: Path) -> list[int]:
    return [line["step"] for line in metrics(folder)]


def test_without_a_checkpoint_a_finished_run_is_not_continued(
    shelf: Shelf, finished: Path, capfd: pytest.CaptureFixture
) -> None:
    shutil.rmtree(finished / "checkpoints")
    before = (finished / "metrics.jsonl").read_bytes()
    assert shelf.run(finished, *EVALUATED, "train.steps=3") == 2
    line = capfd.readouterr().err
    assert "a finished run of 2 steps, and there is no checkpoint to continue it from" in line
    assert f"student.path={finished} hydra.run.dir=DIR" in line
    assert (finished / "metrics.jsonl").read_bytes() == before and shelf.run(finished, *EVALUATED, "train.steps=2") == 0


def test_a_run_that_is_being_continued_is_not_a_finished_one(
    shelf: Shelf, finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert read_run(finished, "run").finished and find_runs([str(finished)])[0].record is not None
    killed_at(4, monkeypatch, shelf, finished, *EVALUATED, "train.steps=5")
    with pytest.raises(SettingError, match=r"^run=.* is being continued beyond step 2, and that has not ended"):
        read_run(finished, "run")
    (run,) = find_runs([str(finished)])
    assert run.record is None and run.status.startswith("not finished: it stopped after step ")
    assert shelf.run(finished, *EVALUATED, "train.steps=2") == 0, "its own command still finds its student"
    assert read_run(finished, "run").training.steps == 2, "and ends the continuation"
    assert shelf.run(finished, *EVALUATED, "train.steps=5") == 0
    assert read_run(finished, "run").training.steps == 5


def test_from_a_checkpoint_that_is_named_a_run_goes_on_after_a_kill(
    shelf: Shelf, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    more, whole, again = (*CONSTANT, "train.steps=5"), tmp_path / "whole", tmp_path / "again"
    assert shelf.run(whole, *more, f"resume={finished / 'checkpoints' / 'step-00000001'}") == 0
    named = again / "checkpoints" / "step-00000001"
    assert shelf.run(again, *CONSTANT, "train.steps=3") == 0  # checkpoints of another beginning
    (again / "results.json").unlink()
    killed_at(4, monkeypatch, shelf, again, *more, f"resume={named}")
    assert steps(again) == [1, 2, 3, 4] and not (again / "checkpoints" / "step-00000004").exists()
    shutil.rmtree(named)  # as pruning does
    capfd.readouterr()
    assert shelf.run(again, *more, f"resume={named}") == 0
    assert "this run started from that checkpoint before and continues after step 3" in capfd.readouterr().err
    assert_same(again, whole)
    assert [line["seconds"] for line in metrics(again)] == sorted(line["seconds"] for line in metrics(again))


def test_a_checkpoint_names_the_one_that_its_run_began_from(shelf: Shelf, finished: Path, tmp_path: Path) -> None:
    named, folder = finished / "checkpoints" / "step-00000002", tmp_path / "begun"
    assert shelf.run(folder, *CONSTANT, "train.steps=3", f"resume={named}") == 0
    (folder / "results.json").unlink()
    assert shelf.run(folder, *CONSTANT, "train.steps=4") == 0, "with resume=auto, too"
    began = [read_record(path)["began_from"] for path in sorted((folder / "checkpoints").iterdir())]
    assert began == [str(named.resolve())] * 2 and read_record(named)["began_from"] is None


def test_without_a_checkpoint_no_line_of_a_log_stays(shelf: Shelf, tmp_path: Path) -> None:
    """That of an evaluation may be of another start."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "history.jsonl").write_text('{"step": 1, "loss": {}, "perplexity": {"heldout": 123456.0}}\n')
    assert shelf.run(folder, *EVALUATED, "train.steps=1") == 0
    (line,) = results(folder)["history"]
    assert line["perplexity"]["heldout"] < 123456.0


def test_snapshots_that_come_too_late_are_named(shelf: Shelf, finished: Path, capfd: pytest.CaptureFixture) -> None:
    assert shelf.run(finished, *EVALUATED, "train.steps=4", "train.snapshots=[1,2,4]") == 0
    assert (
        "train.snapshot_every ask for 2 of a step up to 2, but the run resumes after step 2" in capfd.readouterr().err
    )
    assert results(finished)["snapshots"] == [4]


def test_the_steps_before_an_interruption_have_their_line(tmp_path: Path, tokenizer: Any, rows: np.ndarray) -> None:
    settings = TrainConfig(batch_size=4, accumulate=2, epochs=None, steps=8, log_every=3, save_every=100)

    def fit() -> Fit:
        return Fit(tmp_path, tokenizer, rows, None, make_model("distilbert", 1, seed=5), only(mlm=1.0), settings)

    first, second = fit(), fit()
    first.student.base_model.register_forward_pre_hook(
        lambda *_: signal.raise_signal(signal.SIGTERM) if first.state.step == 3 else None
    )
    with pytest.raises(Interrupted):
        first.run()
    second.resume().run()
    assert [line["step"] for line in first.logs] == [3, 4] and [line["step"] for line in second.logs] == [6, 8]


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
    words = r"^resume=.*step-00000001 would discard what is in hydra\.run\.dir=.*own, whose step-00000003 did not begin"
    with pytest.raises(SettingError, match=words):
        _ = run_folder_of(tmp_path / "own", other).start
    assert run_folder_of(tmp_path / "own", first).start == first, "back to one of its own"
    assert run_folder_of(tmp_path / "new", other).start == other
    (begun,) = saved(tmp_path / "begun", 2, beginning=other)
    shutil.rmtree(other)
    assert run_folder_of(tmp_path / "begun", other).start == begun, "it goes on"


def files_read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files whose digests are taken from here on."""
    read: list[str] = []
    monkeypatch.setattr(files, "sha256", lambda path, real=files.sha256: read.append(path.name) or real(path))
    return read


def test_a_resume_compares_each_file_of_a_checkpoint_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With 84 GB on eight machines each further pass reads another 672."""
    (newest,) = saved(tmp_path / "run", 2, beginning=tmp_path / "other")
    monkeypatch.chdir(tmp_path)
    read, model = files_read(monkeypatch), torch.nn.Linear(2, 2)
    folder = run_folder_of(tmp_path / "run", tmp_path / "other")
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
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int, local_rank: int, shards: bool, expected: list[str]
) -> None:
    """Those of one machine all files between them; those that share a student, which see one storage, all together."""
    (newest,) = saved(tmp_path / "run", 2)
    read, folder = files_read(monkeypatch), run_folder_of(tmp_path / "run", "auto")
    places = {"rank": rank, "size": 4, "local_rank": local_rank, "local_size": 2, "shards_student": shards}
    for name, value in (places | {"agree": lambda work: work(), "gather": lambda value: [value]}).items():
        monkeypatch.setattr(folder.ranks, name, value, raising=False)
    folder.checkpoints.check(newest)
    assert read == expected
