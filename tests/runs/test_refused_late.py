"""What is refused once models and data are there leaves the run's folder byte for byte as it was, on any rank."""

import hashlib
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import wandb
from job import Shelf, lines_of

STEPS = ("schedule=constant", "schedule.warmup=0", "train.epochs=null", "train.save_every=1", "train.keep=9")
CACHED = ("objective.masking.static=true", "objective.cosine.weight=0", "teacher.cache.top_k=8")
RUN = (*STEPS, *CACHED, "train.steps=4", "train.snapshots=[1,3]", "evaluate.every_steps=2")


def observer(kind: str, **settings: Any) -> str:
    values = ", ".join(f"{key}: {value}" for key, value in {"_target_": f"own_parts.{kind}", **settings}.items())
    return f"observers.mine={{{values}}}"


def no_wandb(dir: Path, **_: Any) -> None:
    (dir / "wandb" / "offline-run-1").mkdir(parents=True)
    raise wandb.errors.UsageError("no wandb today")


FULL = SimpleNamespace(total=1, used=1, free=0)
# By what is wrong: the setting that the line begins with, the overrides, and what makes it so on this machine.
LATE: dict[str, tuple[str, list[str], dict[str, Any]]] = {
    "tracker": ("tracker.mode", ["tracker=wandb", "tracker.mode=online"], {}),
    "goal": ("optimize", ["optimize=no_such_number"], {}),
    "best": ("train.keep_best", ["train.keep_best=no_such_number"], {}),
    "observer": ("observers.mine", [observer("Broken")], {}),
    "memory": ("evaluate.batch_size", [], {"distill.evaluation.speed.available": lambda ranks: 1}),
    "top k": ("teacher.cache.top_k", ["teacher.cache.top_k=100000"], {}),
    "size of a cache": ("teacher.cache.gigabytes", ["data.cache=elsewhere", "teacher.cache.gigabytes=1e-9"], {}),
    "room for a cache": ("data.cache", ["data.cache=elsewhere"], {"shutil.disk_usage": lambda path: FULL}),
    "start of the tracker": ("tracker.kind", ["tracker=wandb"], {"wandb.init": no_wandb}),
}


def digest(folder: Path) -> dict[str, str]:
    """The digests of all files, and the folders, by their paths."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "folder"
        for path in folder.rglob("*")
    }


@pytest.fixture(scope="module")
def four(shelf: Shelf) -> Path:
    """A finished run of four steps, with checkpoints, logs, and snapshots after its first and third step."""
    folder = shelf.root / "four-steps"
    assert shelf.run(folder, *RUN) == 0
    return folder


@pytest.mark.parametrize("begun", ["new", "named", "damaged"])
@pytest.mark.parametrize("case", LATE)
def test_a_refused_run_leaves_its_folder_byte_for_byte(
    shelf: Shelf, four: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture, case: str,
    begun: str,
) -> None:  # fmt: skip
    """Also one that would drop the checkpoints after a named one, or set aside what is damaged."""
    setting, overrides, patches = LATE[case]
    folder = tmp_path / "run"
    if begun != "new":
        shutil.copytree(four, folder)
        (folder / "results.json").unlink()
    if begun == "damaged":
        (folder / "results.json").write_text("{}")
        for file in ("checkpoints/step-00000004/model.safetensors", "metrics.jsonl", "history.jsonl"):
            (folder / file).write_bytes(b"{}\n" + (folder / file).read_bytes()[1:])
    from_named = [f"resume={folder / 'checkpoints' / 'step-00000002'}"] if begun == "named" else []
    before = digest(folder)
    monkeypatch.setenv("HOME", str(tmp_path))  # where no key of wandb is
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    for name, value in patches.items():
        monkeypatch.setattr(name, value)
    assert shelf.run(folder, *RUN, *overrides, *from_named) == 2
    assert setting in lines_of(capfd)[-1]  # also where it is one that a checkpoint was not made with
    assert digest(folder) == before and folder.exists() == (begun != "new")


@pytest.mark.parametrize("case", ["tracker", "goal", "best", "observer", "step", "evaluation", "checkpoint"])
def test_what_is_refused_late_ends_all_ranks_alike(
    shelf: Shelf, tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks that only lost rank 0 end with 4, which Slurm takes for a lost machine and starts again."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    overrides = LATE[case][1] if case in LATE else [observer("Failing", method=case)]
    ranks = ("backend=ddp", "backend.processes=2", "train.accumulate=1")
    errors = shelf.run_alone(tmp_path / "run", *RUN, *ranks, *overrides, status=2)
    setting = LATE[case][0] if case in LATE else "observers.mine"
    log = (tmp_path / "run" / "logs" / "rank1.log").read_text()
    assert f"distill: {setting}" in log and f"distill: {setting}" in errors, log
