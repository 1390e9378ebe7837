"""Losses between the inside of two models in whole jobs: projections are trained, resumed and not exported; recipes."""

import shutil
from pathlib import Path

import pytest
import torch
from job import Shelf, assert_same, distill, metrics, results, weights
from safetensors.torch import load_file

NARROW = "student.config={hidden_size:24,num_hidden_layers:2,num_attention_heads:2,intermediate_size:48}"
TERM = (
    "student=bert",
    "student.layers=null",
    NARROW,
    "objective.cosine.weight=0",
    "+objective.hidden_mse.weight=1",
    "train.steps=2",
)
CACHE = ("teacher.cache.top_k=4", "objective.masking.static=true", "objective.cosine.weight=0")
PROJECTIONS = {f"terms.hidden_mse.{number}.weight": (32, 24) for number in range(3)}


@pytest.fixture(scope="module")
def trained(shelf: Shelf) -> Path:
    folder = shelf.root / "projected"
    assert shelf.run(folder, *TERM, "train.save_every=1") == 0
    return folder


def checkpoint(folder: Path, step: int) -> dict[str, torch.Tensor]:
    return load_file(folder / "checkpoints" / f"step-{step:08d}" / "model.safetensors")


def test_projections_are_trained_and_checkpointed(trained: Path) -> None:
    before, after = checkpoint(trained, 1), checkpoint(trained, 2)
    found = {name: tuple(each.shape) for name, each in after.items() if name.startswith("terms.")}
    assert found == PROJECTIONS
    assert all(not torch.equal(before[name], after[name]) for name in PROJECTIONS)
    assert metrics(trained)[-1]["loss/hidden_mse"] > 0
    assert results(trained)["objective"]["terms"]["hidden_mse"] == {"title": "Hidden layers (MSE)", "weight": 1.0}
    assert "Hidden layers (MSE)" in (trained / "report.html").read_text()


def test_projections_are_not_exported(trained: Path, shelf: Shelf) -> None:
    folder = shelf.root / "without"
    plain = [each for each in TERM if "hidden_mse" not in each]
    assert shelf.run(folder, *plain) == 0
    exported, usual = weights(trained), weights(folder)
    assert {name: each.shape for name, each in exported.items()} == {name: each.shape for name, each in usual.items()}
    projections = [checkpoint(trained, 2)[name] for name in PROJECTIONS]
    assert not any(torch.equal(each, other) for each in exported.values() for other in projections)


def test_a_resumed_run_goes_on_with_them_bitwise(trained: Path, shelf: Shelf) -> None:
    folder = shelf.root / "projected-resumed"
    shutil.copytree(trained, folder)
    (folder / "results.json").unlink()
    shutil.rmtree(folder / "checkpoints" / "step-00000002")
    assert shelf.run(folder, *TERM, "train.save_every=1") == 0
    assert_same(folder, trained)
    first, second = checkpoint(folder, 2), checkpoint(trained, 2)
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize(
    ("arguments", "terms"),
    [
        (("objective=tinybert",), ["attention_scores", "hidden_mse"]),
        (("objective=minilm", "objective.relations.relation_heads=16"), ["relations"]),
    ],
)
def test_ready_objectives_run(arguments: tuple[str, ...], terms: list[str], shelf: Shelf, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert shelf.run(folder, *arguments, "train.steps=2", "teacher.micro_batches=2") == 0
    assert sorted(results(folder)["objective"]["terms"]) == terms
    assert all(line[f"loss/{name}"] > 0 for line in metrics(folder) for name in terms)


def test_terms_are_fitted_to_the_layers_that_are_known_for_a_bundled_teacher(tmp_path: Path) -> None:
    """Which are fewer than half, the number of a student whose layers are searched for."""
    folder = tmp_path / "run"
    more = ["teacher=bundled_deep", "objective.relations.weight=1", "objective.hidden_mse.weight=1"]
    assert distill("+recipe=smoke", *more, "train.steps=1", f"hydra.run.dir={folder}") == 0
    assert results(folder)["objective"]["terms"].keys() >= {"relations", "hidden_mse"}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("objective=minilm",), ["objective.relations.relation_heads=48", "32", "divisor of 32"]),
        (
            ("+objective.relations={weight: 1, relation_heads: 4}", "precision.compile=true"),
            ["precision.compile=false"],
        ),
        (("+objective.pooled.weight=1", *CACHE), ["teacher.cache.top_k=4", "objective.pooled.weight=0"]),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(
    arguments: tuple[str, ...], words: list[str], shelf: Shelf, tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    assert shelf.run(tmp_path / "run", *arguments) == 2
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("distill: ")]
    assert len(lines) == 1 and all(word in lines[0] for word in words), lines
