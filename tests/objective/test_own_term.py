"""A loss of the user's own with a projection: logged, trained, checkpointed and resumed, but never exported."""

import shutil
from pathlib import Path

import pytest
import torch
from job import Shelf, assert_alike, assert_same, command, metrics, results, weights
from safetensors.torch import load_file

TERM = "+objective.hidden_1={_target_: own_parts.ProjectedHidden, weight: 3.0, student_layer: 1, teacher_layer: 2}"
PROJECTION = "terms.hidden_1.weight"


@pytest.fixture(scope="module")
def trained(shelf: Shelf) -> Path:
    assert shelf.run(shelf.root / "own-term", TERM) == 0
    return shelf.root / "own-term"


def checkpoint(folder: Path, step: int) -> dict[str, torch.Tensor]:
    return load_file(folder / "checkpoints" / f"step-{step:08d}" / "model.safetensors")


def test_it_is_logged_and_reported_by_its_name(trained: Path) -> None:
    for line in metrics(trained):
        parts = 5 * line["loss/soft"] + 2 * line["loss/mlm"] + line["loss/cosine"] + 3 * line["loss/hidden_1"]
        assert line["loss/total"] == pytest.approx(parts, rel=1e-5)
    content = results(trained)
    assert content["objective"]["terms"]["hidden_1"] == {"title": "Projected hidden state", "weight": 3.0}
    assert content["training"]["final_loss"]["hidden_1"] > 0
    assert "Projected hidden state" in (trained / "report.html").read_text()


def test_its_projection_is_trained_and_checkpointed(trained: Path) -> None:
    before, after = checkpoint(trained, 6), checkpoint(trained, 8)
    assert before.keys() == after.keys() and PROJECTION in before
    assert not torch.equal(before[PROJECTION], after[PROJECTION])
    lines = metrics(trained)
    assert lines[-1]["loss/hidden_1"] < lines[0]["loss/hidden_1"]


def test_it_is_not_exported(trained: Path, done: Path) -> None:
    assert weights(trained).keys() == weights(done).keys()


def test_a_resumed_run_goes_on_with_it_bitwise(trained: Path, shelf: Shelf) -> None:
    folder = shelf.root / "own-term-resumed"
    shutil.copytree(trained, folder)
    (folder / "results.json").unlink()
    shutil.rmtree(folder / "checkpoints" / "step-00000008")
    assert shelf.run(folder, TERM) == 0
    assert_same(folder, trained)
    first, second = checkpoint(folder, 8), checkpoint(trained, 8)
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.slow
def test_two_ranks_train_it_alike(trained: Path, shelf: Shelf) -> None:
    folder = shelf.root / "own-term-ranks"
    ranks = ("backend=ddp", "backend.processes=2", "train.accumulate=1")
    process = command(*shelf.arguments(folder, TERM, *ranks), path=Path(__file__).parent.parent)
    _, errors = process.communicate(timeout=500)
    assert process.returncode == 0, errors
    assert_alike(folder, trained)


@pytest.mark.parametrize(
    ("term", "words"),
    [
        ("+objective.mine={_target_: own_parts.Nothing}", ["objective.mine._target_=own_parts.Nothing", "imported"]),
        ("+objective.mine={_target_: collections.OrderedDict}", ["_target_=collections.OrderedDict", "function"]),
        ("+objective.mine={_target_: pathlib.Path}", ["objective.mine._target_=pathlib.Path", "no loss term"]),
        ("+objective.mine={_target_: own_parts.ProjectedHidden}", ["objective.mine.student_layer: missing"]),
        (TERM.replace("weight", "wait"), ["objective.hidden_1.wait: no setting", "student_layer"]),
        (TERM.replace("student_layer: 1", "student_layer: one"), ["objective.hidden_1.student_layer", "one"]),
        ("+objective.mine=3", ["objective.mine=3", "neither"]),
        ("+objective.mine.weight=1", ["objective.mine: no such loss", "cosine", "_target_"]),
        ("+objective.hidden-3={_target_: own_parts.ProjectedHidden}", ["objective.hidden-3", "letters"]),
        ("objective.mlm.weight=heavy", ["objective.mlm.weight=heavy", "number"]),
        ("+objective.soft.tail=1", ["objective.soft.tail: no setting", "cutoff"]),
    ],
)
def test_terms_that_cannot_be_are_refused(
    term: str, words: list[str], shelf: Shelf, tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    assert shelf.run(tmp_path / "run", term) == 2
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("distill: ")]
    assert len(lines) == 1 and all(word in lines[0] for word in words), lines


@pytest.mark.parametrize(
    ("method", "words"),
    [
        ("build", "build() of Faulty fails: AttributeError"),
        ("count", "count() of Faulty fails: AttributeError"),
        ("loss_sum", "loss_sum() of Faulty fails: RuntimeError: The size of tensor"),
    ],
)
def test_a_fault_in_any_method_is_one_line(
    method: str, words: str, shelf: Shelf, tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    term = f"+objective.mine={{_target_: own_parts.Faulty, method: {method}}}"
    assert shelf.run(tmp_path / "run", term) == 2
    (line,) = [line for line in capfd.readouterr().err.splitlines() if line.startswith("distill: ")]
    assert line.startswith(f"distill: objective.mine: {words}") and "(own_parts.py, line" in line


def test_a_new_loss_is_one_new_file(shelf: Shelf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file in the folder of the terms is found by its name: no list of terms has to be edited."""
    import distill.objective.terms as package

    text = (Path(__file__).parent.parent / "own_parts.py").read_text().replace("ProjectedHidden", "HiddenProjection")
    (tmp_path / "hidden_projection.py").write_text(text)
    monkeypatch.setattr(package, "__path__", [*package.__path__, str(tmp_path)])
    term = "+objective.hidden_projection={weight: 1.0, student_layer: 1, teacher_layer: 2}"
    assert shelf.run(tmp_path / "run", term, "train.steps=1") == 0
    assert "loss/hidden_projection" in metrics(tmp_path / "run")[0]
    both = "+objective.second={kind: hidden_projection, weight: 1.0, student_layer: 0, teacher_layer: 1}"
    assert shelf.run(tmp_path / "both", term, both, "train.steps=1") == 0
    assert {"loss/hidden_projection", "loss/second"} <= metrics(tmp_path / "both")[0].keys()
