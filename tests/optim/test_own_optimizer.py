"""An optimizer and a schedule of the user's own in whole runs: used, recorded, resumed and refused."""

import shutil
from pathlib import Path

import pytest
from job import Shelf, assert_same, metrics
from own_parts import Triangle

OPTIMIZER = ("optimizer=custom", "optimizer._target_=own_parts.Counter", "optimizer.lr=1e-3", "+optimizer.decay=0.5")
SCHEDULE = ("schedule=custom", "schedule._target_=own_parts.Triangle", "+schedule.peak=0.25")


@pytest.fixture(scope="module")
def trained(shelf: Shelf) -> Path:
    assert shelf.run(shelf.root / "own-optimizer", *OPTIMIZER, *SCHEDULE) == 0
    return shelf.root / "own-optimizer"


@pytest.mark.slow
def test_the_schedule_is_in_force(trained: Path) -> None:
    lines = metrics(trained)
    assert [line["lr"] for line in lines] == [1e-3 * Triangle(0.25)((step + 0.5) / 8) for step in range(8)]


@pytest.mark.slow
def test_a_resumed_run_goes_on_bitwise(trained: Path, shelf: Shelf, capfd: pytest.CaptureFixture) -> None:
    folder = shelf.root / "own-optimizer-resumed"
    shutil.copytree(trained, folder)
    (folder / "results.json").unlink()
    shutil.rmtree(folder / "checkpoints" / "step-00000008")
    capfd.readouterr()
    assert shelf.run(folder, *OPTIMIZER[:-1], "+optimizer.decay=0.4", *SCHEDULE) == 2
    assert "optimizer.decay was 0.5 and is now 0.4" in capfd.readouterr().err
    assert shelf.run(folder, *OPTIMIZER, *SCHEDULE) == 0
    assert_same(folder, trained)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["optimizer=custom"], ["optimizer._target_"]),
        (["schedule=custom"], ["schedule._target_"]),
        (["optimizer.kind=magic"], ["optimizer.kind=magic", "adamw", "optimizer._target_"]),
        (["schedule.kind=stairs"], ["schedule.kind=stairs", "constant, cosine, linear"]),
        (["schedule=constant", "schedule.floor=0.1"], ["schedule.floor: no setting"]),
        (["schedule=constant", "+schedule.floor=0.1"], ["schedule.floor: no setting"]),
        ([*OPTIMIZER, "+optimizer.speed=1"], ["optimizer.speed: no setting of own_parts.Counter", "decay"]),
        ([*SCHEDULE[:-1], "+schedule.warmup=0.1"], ["schedule.warmup: no setting of own_parts.Triangle", "peak"]),
        (["optimizer=custom", "optimizer._target_=own_parts.Hoarder"], ["Hoarder keeps a list", "checkpoints"]),
        (["optimizer.lr=nan"], ["optimizer.lr=nan"]),
    ],
)
def test_what_cannot_be_is_refused(
    settings: list[str], words: list[str], shelf: Shelf, tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    assert shelf.run(tmp_path / "run", *settings) == 2
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("distill: ")]
    assert len(lines) == 1 and all(word in lines[0] for word in words), lines
    print(lines[0])


def test_a_new_optimizer_and_a_new_schedule_are_one_new_file_each(
    shelf: Shelf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import distill.optim.optimizers as optimizers
    import distill.optim.schedules as schedules

    for package, name, own in ((optimizers, "counter_momentum", "Counter"), (schedules, "up_and_down", "Triangle")):
        folder = tmp_path / name
        folder.mkdir()
        new = "".join(part.capitalize() for part in name.split("_"))
        text = (Path(__file__).parent.parent / "own_parts.py").read_text().replace(f"class {own}", f"class {new}")
        (folder / f"{name}.py").write_text(text.replace(f"{own}()", f"{new}()"))
        monkeypatch.setattr(package, "__path__", [*package.__path__, str(folder)])
    without = ("~optimizer.betas", "~optimizer.eps", "~optimizer.weight_decay", "~schedule.warmup", "~schedule.floor")
    kinds = ("optimizer.kind=counter_momentum", "schedule.kind=up_and_down", *without, "train.steps=2")
    assert shelf.run(tmp_path / "run", *kinds) == 0
    assert [line["lr"] for line in metrics(tmp_path / "run")] == [0.5e-3, 0.5e-3]
